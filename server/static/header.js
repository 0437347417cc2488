// The page's head: which model, whether connected, light or dark. Knows nothing of the conversation.

import { ConnectionState } from "./connection.js";

const WORDS = {
  [ConnectionState.CONNECTING]: "Connecting",
  [ConnectionState.OPEN]: "Connected",
  [ConnectionState.WAITING]: "Reconnecting",
};

export class Header {
  #model;
  #link;
  #offline;
  #theme;

  /** @param {Document} page */
  constructor(page) {
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

  showModel(name) {
    this.#model.textContent = name ?? "";
    this.#model.hidden = name === null;
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
