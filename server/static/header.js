// The chat page's head: model, connection state, and the switch between light and dark.

import { ConnectionState } from "./connection.js";

const WORDS = {
  [ConnectionState.CONNECTING]: "Connecting",
  [ConnectionState.OPEN]: "Connected",
  [ConnectionState.WAITING]: "Reconnecting",
};
const NO_KEY = "Needs a key"; // instead of the last two, if the server refuses the page
const UNREACHABLE = "No connection to the server. Retrying…";

export class Header {
  #page;
  #model;
  #pick;
  #link;
  #offline;
  #reason;
  #reconnect;
  #enterKey;
  #isRefused = false;
  #theme;

  /**
   * @param {Document} page
   * @param {(model: string) => void} onPick called with the model that the user picked.
   */
  constructor(page, onPick) {
    this.#page = page;
    this.#pick = page.getElementById("pick-model");
    this.#pick.onchange = () => onPick(this.#pick.value);
    this.#model = page.getElementById("model");
    this.#link = page.getElementById("link");
    this.#offline = page.getElementById("offline");
    this.#reason = page.getElementById("offline-reason");
    this.#reconnect = page.getElementById("reconnect");
    this.#enterKey = page.getElementById("enter-key");
    this.#theme = page.getElementById("theme");
    this.#theme.onclick = () => {
      globalThis.theme.set(this.#otherTheme);
      this.#showTheme();
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#showTheme());
    this.#showTheme();
  }

  /** Show the model; with several, let the user pick one. */
  showModel(name, names) {
    const isPicked = name !== null && names.length > 1;
    this.#model.textContent = name ?? "";
    this.#model.hidden = name === null || isPicked;
    this.#pick.hidden = !isPicked;
    if (!isPicked) return;
    this.#pick.replaceChildren(...[...new Set([...names, name])].map((one) => this.#option(one)));
    this.#pick.value = name;
  }

  #option(name) {
    const option = this.#page.createElement("option");
    option.value = name;
    option.textContent = name;
    return option;
  }

  showConnection(state) {
    this.#link.dataset.state = state;
    if (state === ConnectionState.OPEN) {
      this.#isRefused = false;
      this.#offline.hidden = true;
    }
    this.#link.textContent = this.#isRefused ? NO_KEY : WORDS[state];
  }

  /** Show why there is no connection. @param {string|null} refusal the server's reason, null without an answer. */
  showTrouble(refusal) {
    this.#isRefused = refusal !== null;
    if (this.#isRefused) this.#link.textContent = NO_KEY;
    const reason = refusal ?? UNREACHABLE;
    if (this.#reason.textContent !== reason) this.#reason.textContent = reason;
    this.#reconnect.hidden = this.#isRefused;
    this.#enterKey.hidden = !this.#isRefused;
    this.#offline.hidden = false;
  }

  get #otherTheme() {
    return globalThis.theme.current() === "dark" ? "light" : "dark";
  }

  #showTheme() {
    this.#theme.dataset.next = this.#otherTheme;
    this.#theme.setAttribute("aria-label", this.#otherTheme === "dark" ? "Dark theme" : "Light theme");
  }
}
