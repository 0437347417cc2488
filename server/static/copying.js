// Copies text, and shows the result on the button for a moment.

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
