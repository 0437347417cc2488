// Stores chats in the browser: reads, writes and bounds them, and reports problems. Each chat has its
// own entry, so that two tabs with different chats never write the same entry.

const PREFIX = "triolet.chat.";
export const MAX_CHATS = 100; // more make the list hard to search

export const Keeping = Object.freeze({
  KEPT: "kept",
  FULL: "full", // the storage is full: the rest lasts as long as the page
  BLOCKED: "blocked", // storage is blocked for this page
});

export class ChatStore {
  #storage;
  #records = new Map(); // by id, including those that are not stored
  #unkept = new Set(); // ids of records that are not stored
  #isBlocked = false;
  #onChange;

  /**
   * @param {() => Storage} storage may throw if storage is blocked.
   * @param {(id: string|null) => void} onChange another tab wrote a chat; null: any of them.
   */
  constructor(storage, onChange) {
    this.#storage = storage;
    this.#onChange = onChange;
    this.#readAll();
  }

  /** @returns {object[]} all records, last changed first. */
  list() {
    return [...this.#records.values()].sort((one, other) => other.changedMs - one.changedMs);
  }

  /** @returns {object|undefined} */
  get(id) {
    return this.#records.get(id);
  }

  get keeping() {
    if (this.#isBlocked) return Keeping.BLOCKED;
    return this.#unkept.size > 0 ? Keeping.FULL : Keeping.KEPT;
  }

  /**
   * Store a chat, replacing its earlier record.
   *
   * @param {{id: string, title: string, changedMs: number, turns: object[]}} record
   * @returns {string[]} ids of the chats that were removed to make space.
   */
  save(record) {
    this.#records.set(record.id, record);
    this.#write(record);
    const surplus = this.list().slice(MAX_CHATS);
    for (const { id } of surplus) this.remove(id);
    return surplus.map(({ id }) => id);
  }

  /** Remove a chat. @returns {object|undefined} its record. */
  remove(id) {
    const record = this.#records.get(id);
    this.#records.delete(id);
    this.#unkept.delete(id);
    this.#attempt((storage) => storage.removeItem(PREFIX + id));
    // Store what did not fit before.
    for (const waiting of [...this.#unkept]) this.#write(this.#records.get(waiting));
    return record;
  }

  /** Handle a change by another tab. @param {{key: string|null, newValue: string|null}} event */
  changedElsewhere({ key, newValue }) {
    if (key === null) {
      this.#records.clear();
      this.#readAll();
      this.#onChange(null);
    } else if (key.startsWith(PREFIX)) {
      const id = key.slice(PREFIX.length);
      const record = parse(newValue, id);
      if (record) this.#records.set(id, record);
      else this.#records.delete(id);
      this.#unkept.delete(id);
      this.#onChange(id);
    }
  }

  #readAll() {
    this.#attempt((storage) => {
      for (const key of Object.keys(storage).filter((name) => name.startsWith(PREFIX))) {
        const id = key.slice(PREFIX.length);
        const record = parse(storage.getItem(key), id);
        if (record) this.#records.set(id, record);
      }
    });
  }

  #write(record) {
    const isKept = this.#attempt((storage) => storage.setItem(PREFIX + record.id, JSON.stringify(record)));
    if (isKept) this.#unkept.delete(record.id);
    else this.#unkept.add(record.id);
  }

  /** Use the storage. @returns {boolean} whether it worked. */
  #attempt(deed) {
    try {
      deed(this.#storage());
      this.#isBlocked = false;
      return true;
    } catch (error) {
      this.#isBlocked = error.name !== "QuotaExceededError";
      return false;
    }
  }
}

/** @returns {object|null} a record, or null if the entry is invalid, because other programs may write there. */
function parse(text, id) {
  try {
    const record = JSON.parse(text);
    const isOne = record.id === id && typeof record.title === "string" && Number.isFinite(record.changedMs);
    return isOne && record.turns.length > 0 && record.turns.every(isTurn) ? record : null;
  } catch {
    return null;
  }
}

function isTurn({ question, answer }) {
  return typeof question === "string" && (answer === null || typeof answer.text === "string");
}
