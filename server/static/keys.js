// The API key of a server that asks for one: where it is kept, and how it travels.

import { read, write } from "./small_storage.js";

const KEY = "triolet.key"; // for this tab only: whoever uses the browser next shall not have it

export function keptKey() {
  return read(() => sessionStorage, KEY) ?? "";
}

export function keepKey(key) {
  write(() => sessionStorage, KEY, key);
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
