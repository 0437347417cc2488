// Copies text, and lets the button say for a moment whether that worked.

const COPIED_FOR_MS = 1_500;

/**
 * @param {HTMLButtonElement} button
 * @param {string} text
 */
export async function copyText(button, text) {
  button.dataset.label ??= button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = button.dataset.label), COPIED_FOR_MS);
}
