// Sets light or dark before the first paint: a classic script in the head, because modules run too
// late and would flash. Knows the choice that is remembered and nothing of the page's buttons.
"use strict";

globalThis.theme = (() => {
  const key = "triolet.theme";
  const root = document.documentElement;

  function remembered() {
    try {
      return localStorage.getItem(key);
    } catch {
      return null; // storage is forbidden here: follow the system
    }
  }

  function set(theme) {
    root.dataset.theme = theme;
    try {
      localStorage.setItem(key, theme);
    } catch {
      // Storage is forbidden here: the choice holds until the page is closed.
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
