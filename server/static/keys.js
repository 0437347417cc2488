// Stores the API key, and adds it to requests and WebSockets.

import { read, write } from "./small_storage.js";

const KEY = "triolet.key"; // for this tab only, so that the browser's next user does not have it

export function keptKey() {
  return read(() => sessionStorage, KEY) ?? "";
}

export function keepKey(key) {
  write(() => sessionStorage, KEY, key);
}

/** The headers with the key; empty without one. */
export function keyHeaders(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** The subprotocols with the key: a WebSocket cannot set headers, and URLs are logged. */
export function keyProtocols(key) {
  if (!key) return [];
  const bytes = String.fromCharCode(...new TextEncoder().encode(key));
  const word = btoa(bytes).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return ["triolet", `triolet-key.${word}`];
}
