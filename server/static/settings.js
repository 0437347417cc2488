// What the reader has chosen for all answers: instructions, sampling, and the key of a server that
// asks for one. Kept by the browser; knows no socket and no conversation.

const STORE = "triolet.settings";
const KEY = "triolet.key"; // for this tab only: whoever uses the browser next shall not have it
const NUMBERS = ["temperature", "top_p", "max_output_tokens"];

export class Settings {
  #dialog;
  #fields;
  #opener;

  /**
   * @param {Document} page
   * @param {{onKey: () => void}} listener told when the key has changed.
   */
  constructor(page, { onKey }) {
    this.#dialog = page.getElementById("settings");
    this.#opener = page.getElementById("open-settings");
    this.#fields = Object.fromEntries(
      ["instructions", ...NUMBERS, "key"].map((name) => [name, page.getElementById(`set-${name}`)]),
    );
    this.#opener.onclick = () => this.open();
    page.getElementById("close-settings").onclick = () => this.#dialog.close();
    page.getElementById("reset-settings").onclick = () => this.#reset();
    this.#dialog.addEventListener("close", () => {
      const before = this.key;
      this.#save();
      if (this.key !== before) onKey();
    });
    this.#load();
  }

  /** Show the dialog; with a reason why, above its fields. */
  open(reason = "") {
    const shown = document.getElementById("settings-reason");
    shown.textContent = reason;
    shown.hidden = !reason;
    if (!this.#dialog.open) this.#dialog.showModal();
    if (reason) this.#fields.key.focus();
  }

  get key() {
    return read(sessionStorage, KEY) ?? "";
  }

  /** The fields of a request for an answer that were chosen. */
  parameters() {
    const chosen = {};
    const instructions = this.#fields.instructions.value.trim();
    if (instructions) chosen.instructions = instructions;
    for (const name of NUMBERS) {
      const field = this.#fields[name];
      if (field.value !== "" && field.validity.valid) chosen[name] = field.valueAsNumber;
    }
    return chosen;
  }

  #load() {
    let kept = {};
    try {
      kept = JSON.parse(read(localStorage, STORE) ?? "{}") ?? {};
    } catch {
      kept = {}; // somebody else wrote there
    }
    for (const name of ["instructions", ...NUMBERS]) {
      this.#fields[name].value = typeof kept[name] === "string" ? kept[name] : "";
    }
    this.#fields.key.value = this.key;
  }

  #save() {
    const names = ["instructions", ...NUMBERS];
    const kept = Object.fromEntries(names.map((name) => [name, this.#fields[name].value]));
    write(localStorage, STORE, JSON.stringify(kept));
    write(sessionStorage, KEY, this.#fields.key.value.trim());
  }

  #reset() {
    for (const name of ["instructions", ...NUMBERS]) this.#fields[name].value = "";
    this.#fields.instructions.focus();
  }
}

/** The headers that carry a key; none without one. */
export function keyHeaders(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** What a WebSocket offers to carry a key: it can set no header, and an address would be written down. */
export function keyProtocols(key) {
  if (!key) return [];
  const bytes = String.fromCharCode(...new TextEncoder().encode(key));
  const word = btoa(bytes).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return ["triolet", `triolet-key.${word}`];
}

function read(storage, name) {
  try {
    return storage.getItem(name);
  } catch {
    return null; // storage is forbidden here: what is chosen holds until the page is closed
  }
}

function write(storage, name, value) {
  try {
    storage.setItem(name, value);
  } catch {
    // Storage is forbidden or full: the choice holds until the page is closed.
  }
}
