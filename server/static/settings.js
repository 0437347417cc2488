// The settings dialog: model, instructions, sampling and API key. Validates them and stores them in
// the browser.

import { keepKey, keptKey } from "./keys.js";
import { read, write } from "./small_storage.js";

const STORE = "triolet.settings";
const NUMBERS = ["temperature", "top_p", "max_output_tokens", "seed"];
const KEPT = ["model", "instructions", "stop", ...NUMBERS];
const MAX_STOPS = 16; // the server's bounds
const LONGEST_STOP = 64;

export class Settings {
  #page;
  #dialog;
  #fields;
  #onKey;
  #onModel;

  /**
   * @param {Document} page
   * @param {{onKey: () => void, onModel: () => void}} listener called when one of them has changed.
   */
  constructor(page, { onKey, onModel }) {
    this.#page = page;
    this.#onKey = onKey;
    this.#onModel = onModel;
    this.#dialog = page.getElementById("settings");
    this.#fields = Object.fromEntries([...KEPT, "key"].map((name) => [name, page.getElementById(`set-${name}`)]));
    page.getElementById("open-settings").onclick = () => this.open();
    page.getElementById("close-settings").onclick = () => this.#closeIfValid();
    page.getElementById("reset-settings").onclick = () => this.#reset();
    this.#dialog.addEventListener("close", () => this.#save());
    this.#dialog.addEventListener("input", ({ target }) => this.#check(target));
    this.#load();
  }

  /** Show the dialog; if a key is needed, with the reason and the focus on its field. */
  open(reason = "") {
    const shown = this.#page.getElementById("settings-reason");
    shown.textContent = reason;
    shown.hidden = !reason;
    const [label] = this.#fields.key.labels;
    if (reason) shown.after(label, this.#fields.key);
    else this.#page.getElementById("settings-choices").before(label, this.#fields.key);
    if (!this.#dialog.open) this.#dialog.showModal();
    if (reason) this.#fields.key.focus();
  }

  /** Offer these models. */
  offer(names) {
    const wanted = this.model;
    const options = ["", ...names].map((name) => {
      const option = this.#page.createElement("option");
      option.value = name;
      option.textContent = name || "the server's default";
      return option;
    });
    this.#fields.model.replaceChildren(...options);
    this.#fields.model.value = names.includes(wanted) ? wanted : "";
  }

  get key() {
    return keptKey();
  }

  /** The chosen model, or an empty string. */
  get model() {
    return this.#fields.model.value;
  }

  /** The chosen fields of a request. */
  parameters() {
    const chosen = {};
    const instructions = this.#fields.instructions.value.trim();
    if (instructions) chosen.instructions = instructions;
    for (const name of NUMBERS) {
      const field = this.#fields[name];
      if (field.value !== "" && field.validity.valid) chosen[name] = field.valueAsNumber;
    }
    const stop = stops(this.#fields.stop.value);
    if (stop.length > 0 && this.#fields.stop.validity.valid) chosen.stop = stop;
    return chosen;
  }

  #load() {
    let kept = {};
    try {
      kept = JSON.parse(read(() => localStorage, STORE) ?? "{}") ?? {};
    } catch {
      kept = {}; // written by another program
    }
    if (typeof kept.model === "string" && kept.model) this.offer([kept.model]);
    for (const name of KEPT) this.#fields[name].value = typeof kept[name] === "string" ? kept[name] : "";
    this.#fields.key.value = this.key;
    this.#checkAll();
  }

  #closeIfValid() {
    const wrong = this.#checkAll();
    if (wrong) wrong.focus();
    else this.#dialog.close();
  }

  #save() {
    for (const name of KEPT) if (!this.#fields[name].validity.valid) this.#fields[name].value = "";
    this.#checkAll();
    const kept = Object.fromEntries(KEPT.map((name) => [name, this.#fields[name].value]));
    write(() => localStorage, STORE, JSON.stringify(kept));
    this.#onModel();
    const key = this.#fields.key.value.trim();
    if (key === this.key) return;
    keepKey(key);
    this.#onKey();
  }

  #reset() {
    for (const name of KEPT) this.#fields[name].value = "";
    this.#checkAll();
    this.#fields.instructions.focus();
  }

  /** @returns {HTMLElement|undefined} the first field with an invalid value. */
  #checkAll() {
    for (const name of KEPT) this.#check(this.#fields[name]);
    return KEPT.map((name) => this.#fields[name]).find((field) => !field.validity.valid);
  }

  #check(field) {
    if (field === this.#fields.stop) field.setCustomValidity(whatIsWrongWithStops(stops(field.value)));
    const isValid = field.validity.valid;
    if (isValid) field.removeAttribute("aria-invalid");
    else field.setAttribute("aria-invalid", "true");
    const problem = this.#page.getElementById(`${field.id}-problem`);
    if (!problem) return;
    const words = isValid ? "" : field.validationMessage;
    if (problem.textContent !== words) problem.textContent = words;
  }
}

/** The stop strings: one per line, where \n is a line break and \t a tab. */
function stops(text) {
  const lines = text.split("\n").filter((line) => line !== "");
  return lines.map((line) => line.replace(/\\([nt\\])/g, (_, mark) => ({ n: "\n", t: "\t", "\\": "\\" })[mark]));
}

function whatIsWrongWithStops(found) {
  if (found.length > MAX_STOPS) return `At most ${MAX_STOPS} texts.`;
  return found.some((stop) => stop.length > LONGEST_STOP) ? `At most ${LONGEST_STOP} characters each.` : "";
}
