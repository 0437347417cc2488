// Small values in a storage of the browser, which may be forbidden or full.

export function read(storage, name) {
  try {
    return storage().getItem(name);
  } catch {
    return null; // storage is forbidden here: what is chosen holds until the page is closed
  }
}

export function write(storage, name, value) {
  try {
    storage().setItem(name, value);
  } catch {
    // Storage is forbidden or full: the choice holds until the page is closed.
  }
}
