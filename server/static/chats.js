// Switches between chats and stores them: connects the store, the list and the chat. A chat is stored
// from its first question on and has its own address.

import { Conversation } from "./conversation.js";

export class Chats {
  #store;
  #list;
  #chat;
  #loaded = new Map(); // conversations by id, for running answers
  #current = null;
  #removed = []; // records that an undo brings back

  /**
   * @param {ChatStore} store
   * @param {ChatList} list
   * @param {Chat} chat
   */
  constructor(store, list, chat) {
    this.#store = store;
    this.#list = list;
    this.#chat = chat;
  }

  /** Show the chat that the page's address names, or a new one. */
  openByAddress() {
    const id = location.hash.slice(1);
    this.#show(this.#store.get(id) ? this.#conversation(id) : fresh());
  }

  /** Continue answers that were running before a reload. */
  resume(notes) {
    for (const note of notes) if (this.#store.get(note.chat)) this.#chat.resume(this.#conversation(note.chat), note);
  }

  /** Start a new chat. */
  begin() {
    if (!this.#current.isEmpty) this.#go("");
  }

  /** Show a chat. */
  open(id) {
    if (id !== this.#current.id) this.#go(id);
  }

  rename(id, title) {
    const conversation = this.#conversation(id);
    conversation.rename(title);
    this.keep(conversation);
  }

  /** Remove some chats; `undo` brings them back. */
  remove(ids) {
    for (const id of ids) {
      this.#chat.stop(this.#conversation(id));
      this.#loaded.delete(id);
    }
    this.#removed = ids.map((id) => this.#store.remove(id));
    if (ids.includes(this.#current.id)) this.#go("", { replace: true });
    this.#redraw();
    this.#list.offerUndo(this.#removed);
  }

  removeAll() {
    this.remove(this.#store.list().map(({ id }) => id));
  }

  /** Restore the chats that were removed last. */
  undo() {
    for (const record of this.#removed) this.#store.save(record);
    this.#removed = [];
    this.#redraw();
  }

  /** Store a conversation. */
  keep(conversation) {
    const isGone = this.#loaded.get(conversation.id) !== conversation && conversation !== this.#current;
    if (isGone) return; // removed before its answer ended
    if (this.#current.id === conversation.id && location.hash.slice(1) !== conversation.id) {
      history.replaceState(null, "", `#${conversation.id}`);
    }
    this.#loaded.set(conversation.id, conversation);
    for (const id of this.#store.save(conversation.record())) this.#loaded.delete(id);
    this.#redraw();
  }

  /** Another tab has written a chat. @param {string|null} id null: any. */
  changedElsewhere(id) {
    const stale = [...this.#loaded.values()].filter((one) => (id === null || one.id === id) && !one.isAnswering);
    for (const conversation of stale) {
      this.#loaded.delete(conversation.id);
      if (conversation === this.#current) this.openByAddress();
    }
    this.#redraw();
  }

  #conversation(id) {
    const conversation = this.#loaded.get(id) ?? new Conversation(this.#store.get(id));
    this.#loaded.set(id, conversation);
    return conversation;
  }

  #go(id, { replace = false } = {}) {
    const address = id ? `#${id}` : location.pathname;
    if (replace) history.replaceState(null, "", address);
    else history.pushState(null, "", address);
    this.openByAddress();
  }

  #show(conversation) {
    this.#current = conversation;
    this.#chat.show(conversation);
    this.#redraw();
  }

  #redraw() {
    const isAnswering = (id) => this.#loaded.get(id)?.isAnswering ?? false;
    const entries = this.#store.list().map(({ id, title }) => ({ id, title, isAnswering: isAnswering(id) }));
    this.#list.show(entries, this.#current.id, this.#store.keeping);
    document.title = this.#current.title ? `${this.#current.title} · Triolet` : "Triolet";
  }
}

function fresh() {
  // Not randomUUID: pages over plain HTTP from another host lack it.
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return new Conversation({ id: Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("") });
}
