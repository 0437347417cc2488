// Reads and writes small values in the browser's storage, which may be blocked or full.

export function read(storage, name) {
  try {
    return storage().getItem(name);
  } catch {
    return null; // storage is blocked: choices last until the page is closed
  }
}

export function write(storage, name, value) {
  try {
    storage().setItem(name, value);
  } catch {
    // Storage is blocked or full: the choice lasts until the page is closed.
  }
}
