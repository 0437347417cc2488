// Stores the ids of running answers for this tab, so that they continue after a reload.

import { read, write } from "./small_storage.js";

const STORE = "triolet.under-way";

/** @param {{chat: string, lane: string, responseId: string, position: number|null}[]} notes */
export function keepUnderWay(notes) {
  write(() => sessionStorage, STORE, JSON.stringify(notes));
}

/** @returns {{chat: string, lane: string, responseId: string, position: number|null}[]} each once. */
export function takeUnderWay() {
  const text = read(() => sessionStorage, STORE);
  keepUnderWay([]);
  try {
    const notes = JSON.parse(text ?? "[]");
    return Array.isArray(notes) ? notes.filter(isNote) : [];
  } catch {
    return []; // written by another program
  }
}

function isNote(note) {
  return ["chat", "lane", "responseId"].every((name) => typeof note?.[name] === "string");
}
