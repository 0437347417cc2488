// Keeps chats in this browser: reads, writes, bounds them, says how well that goes. Knows records and
// the browser's storage; no socket and no page. One entry for each chat, so that two tabs that write
// different chats never write the same entry.

const PREFIX = "triolet.chat.";
export const MAX_CHATS = 100; // the longest list that a reader still finds something in

export const Keeping = Object.freeze({
  KEPT: "kept",
  FULL: "full", // the browser gives no more room: what did not fit lives as long as the page
  BLOCKED: "blocked", // it keeps nothing for this page
});

export class ChatStore {
  #storage;
  #records = new Map(); // by id; also what the browser did not take
  #unkept = new Set(); // ids of these
  #isBlocked = false;
  #onChange;

  /**
   * @param {() => Storage} storage may throw where storage is forbidden.
   * @param {(id: string|null) => void} onChange another tab wrote a chat; null: any of them.
   */
  constructor(storage, onChange) {
    this.#storage = storage;
    this.#onChange = onChange;
    this.#readAll();
  }

  /** @returns {object[]} all records, the one that changed last first. */
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
   * Keep a chat, in the place of what is kept of it.
   *
   * @param {{id: string, title: string, changedMs: number, turns: object[]}} record
   * @returns {string[]} ids of the chats that had to give way to it.
   */
  save(record) {
    this.#records.set(record.id, record);
    this.#write(record);
    const surplus = this.list().slice(MAX_CHATS);
    for (const { id } of surplus) this.remove(id);
    return surplus.map(({ id }) => id);
  }

  /** Forget a chat. @returns {object|undefined} what it was. */
  remove(id) {
    const record = this.#records.get(id);
    this.#records.delete(id);
    this.#unkept.delete(id);
    this.#attempt((storage) => storage.removeItem(PREFIX + id));
    // There is room now for what did not fit.
    for (const waiting of [...this.#unkept]) this.#write(this.#records.get(waiting));
    return record;
  }

  /** Take in what another tab wrote. @param {{key: string|null, newValue: string|null}} event */
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

  /** Do something with the storage. @returns {boolean} whether the browser let it happen. */
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

/** @returns {object|null} a record; null for what is none: anybody may have written there. */
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
