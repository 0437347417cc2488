// The page's head: which model, whether connected, light or dark. Knows nothing of the conversation.

import { ConnectionState } from "./connection.js";

const WORDS = {
  [ConnectionState.CONNECTING]: "Connecting",
  [ConnectionState.OPEN]: "Connected",
  [ConnectionState.WAITING]: "Reconnecting",
};

export class Header {
  #page;
  #model;
  #pick;
  #link;
  #offline;
  #theme;

  /**
   * @param {Document} page
   * @param {(model: string) => void} onPick told which model the reader wants here.
   */
  constructor(page, onPick) {
    this.#page = page;
    this.#pick = page.getElementById("pick-model");
    this.#pick.onchange = () => onPick(this.#pick.value);
    this.#model = page.getElementById("model");
    this.#link = page.getElementById("link");
    this.#offline = page.getElementById("offline");
    this.#theme = page.getElementById("theme");
    this.#theme.onclick = () => {
      globalThis.theme.set(this.#otherTheme);
      this.#showTheme();
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#showTheme());
    this.#showTheme();
  }

  /** Show the model that is asked; where there are several, let the reader pick another. */
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
    this.#link.textContent = WORDS[state];
    // A try that has just begun says nothing yet: the strip stays as it is until it ends.
    if (state !== ConnectionState.CONNECTING) this.#offline.hidden = state === ConnectionState.OPEN;
  }

  get #otherTheme() {
    return globalThis.theme.current() === "dark" ? "light" : "dark";
  }

  #showTheme() {
    this.#theme.dataset.next = this.#otherTheme;
    this.#theme.setAttribute("aria-label", this.#otherTheme === "dark" ? "Dark theme" : "Light theme");
  }
}
