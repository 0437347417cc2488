// Sets the light or dark theme before the first paint: a classic script in the head, because modules
// run too late and the page would flash.
"use strict";

globalThis.theme = (() => {
  const key = "triolet.theme";
  const root = document.documentElement;

  function remembered() {
    try {
      return localStorage.getItem(key);
    } catch {
      return null; // storage is blocked: follow the system
    }
  }

  function set(theme) {
    root.dataset.theme = theme;
    try {
      localStorage.setItem(key, theme);
    } catch {
      // Storage is blocked: the choice lasts until the page is closed.
    }
  }

  function current() {
    const systemIsDark = matchMedia("(prefers-color-scheme: dark)").matches;
    return root.dataset.theme ?? (systemIsDark ? "dark" : "light");
  }

  const theme = remembered();
  if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  return { current, set };
})();
