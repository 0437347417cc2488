// Shows the list of chats and reports the user's actions on them. On a narrow page the list is a
// drawer over the conversation.

import { Keeping } from "./store.js";

const NOTICES = {
  [Keeping.KEPT]: "",
  [Keeping.FULL]: "The browser's storage is full: the latest changes are lost when this page closes. Delete chats to free space.",
  [Keeping.BLOCKED]: "This browser blocks storage for this page: chats are lost when it closes.",
};
const WIDE = matchMedia("(min-width: 56rem)"); // as in the style sheet

export class ChatList {
  #page;
  #panel;
  #toggle;
  #rows;
  #template;
  #deeds;
  #renaming = null; // id

  /**
   * @param {Document} page
   * @param {{onOpen: (id: string) => void, onRename: (id: string, title: string) => void,
   *   onRemove: (id: string) => void, onRemoveAll: () => void, onUndo: () => void}} deeds
   */
  constructor(page, deeds) {
    this.#page = page;
    this.#deeds = deeds;
    this.#panel = page.getElementById("chats");
    this.#toggle = page.getElementById("open-chats");
    this.#rows = page.getElementById("chat-list");
    this.#template = page.getElementById("chat-row");
    this.#toggle.onclick = () => this.#setOpen(true);
    for (const id of ["close-chats", "chats-backdrop"]) page.getElementById(id).onclick = () => this.close();
    page.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#isOpen && !this.#renaming) this.close();
    });
    page.getElementById("delete-all").onclick = () => this.#deeds.onRemoveAll();
    page.getElementById("undo").onclick = () => this.#undo();
    page.getElementById("dismiss-undo").onclick = () => this.#dismissUndo();
    WIDE.addEventListener("change", () => this.#setOpen(this.#isOpen && !WIDE.matches));
    this.#setOpen(false);
  }

  /**
   * Show these chats.
   *
   * @param {{id: string, title: string, isAnswering: boolean}[]} entries
   * @param {string} currentId
   * @param {string} keeping one of Keeping.
   */
  show(entries, currentId, keeping) {
    const focused = this.#page.activeElement?.closest(".chat-row")?.dataset.id;
    if (!this.#renaming) {
      this.#rows.replaceChildren(...entries.map((entry) => this.#row(entry, entry.id === currentId)));
      if (focused) this.#rowOf(focused)?.querySelector(".chat-title").focus();
    }
    this.#page.getElementById("no-chats").hidden = entries.length > 0;
    this.#page.getElementById("delete-all").hidden = entries.length === 0;
    const notice = this.#page.getElementById("chats-notice");
    if (notice.textContent !== NOTICES[keeping]) notice.textContent = NOTICES[keeping];
    notice.hidden = !NOTICES[keeping];
  }

  /** Show what was removed, with an undo button. */
  offerUndo(records) {
    const what = records.length === 1 ? `“${records[0].title}” deleted.` : `${records.length} chats deleted.`;
    this.#page.getElementById("removed").textContent = what;
    this.#page.getElementById("removal").hidden = false;
    this.#page.getElementById("undo").focus(); // the focused row was removed
  }

  /** Close the drawer, if the list is one. */
  close() {
    if (!this.#isOpen) return;
    this.#setOpen(false);
    this.#toggle.focus();
  }

  get #isOpen() {
    return this.#panel.classList.contains("is-open");
  }

  #setOpen(isOpen) {
    this.#panel.classList.toggle("is-open", isOpen);
    this.#panel.inert = !isOpen && !WIDE.matches;
    this.#toggle.setAttribute("aria-expanded", String(isOpen));
    this.#page.getElementById("chats-backdrop").hidden = !isOpen;
    // Content behind the drawer cannot be reached by Tab.
    for (const part of this.#page.querySelectorAll("body > .bar, body > main, body > .dock")) part.inert = isOpen;
    if (isOpen) (this.#rows.querySelector("[aria-current]") ?? this.#page.getElementById("close-chats")).focus();
  }

  #row({ id, title, isAnswering }, isCurrent) {
    const row = this.#template.content.firstElementChild.cloneNode(true);
    const part = (selector) => row.querySelector(selector);
    row.dataset.id = id;
    row.classList.toggle("is-answering", isAnswering);
    part(".chat-title").textContent = title;
    part(".chat-title").title = title;
    if (isAnswering) part(".chat-title").setAttribute("aria-label", `${title}, answering`);
    if (isCurrent) part(".chat-title").setAttribute("aria-current", "page");
    part(".chat-title").onclick = () => {
      this.close();
      this.#deeds.onOpen(id);
    };
    part(".rename").setAttribute("aria-label", `Rename ${title}`);
    part(".rename").onclick = () => this.#rename(row, id, title);
    part(".delete").setAttribute("aria-label", `Delete ${title}`);
    part(".delete").onclick = () => this.#deeds.onRemove(id);
    return row;
  }

  #rename(row, id, title) {
    const field = this.#page.createElement("input");
    field.className = "chat-name";
    field.value = title;
    field.maxLength = 60;
    field.setAttribute("aria-label", "Name of the chat");
    this.#renaming = id;
    let isOver = false;
    const end = (name, hasFocus) => {
      if (isOver) return;
      isOver = true;
      this.#renaming = null;
      this.#deeds.onRename(id, name);
      if (hasFocus) this.#rowOf(id)?.querySelector(".rename").focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.isComposing || (event.key !== "Enter" && event.key !== "Escape")) return;
      event.preventDefault();
      event.stopPropagation(); // Escape stops answers elsewhere
      end(event.key === "Enter" ? field.value : title, true);
    });
    field.addEventListener("blur", () => end(field.value, false));
    row.replaceChildren(field);
    field.select();
  }

  #undo() {
    this.#deeds.onUndo();
    this.#dismissUndo();
  }

  #dismissUndo() {
    this.#page.getElementById("removal").hidden = true;
    const next = this.#rows.querySelector(".chat-title") ?? this.#page.getElementById("close-chats");
    (next.checkVisibility() ? next : this.#page.getElementById("question")).focus();
  }

  #rowOf(id) {
    return [...this.#rows.children].find((row) => row.dataset.id === id);
  }
}
