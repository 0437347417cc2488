// The input field for questions, and its keys.

export class Composer {
  #field;
  #send;
  #stop;
  #notice;
  #isBusy = false;
  #isEditing = false;
  #onAsk;
  #onAskInstead;

  /**
   * @param {Document} page
   * @param {{onAsk: (question: string) => boolean, onAskInstead: (question: string) => boolean,
   *   onStop: () => void}} deeds the first two return whether the question was accepted.
   */
  constructor(page, { onAsk, onAskInstead, onStop }) {
    this.#field = page.getElementById("question");
    this.#send = page.getElementById("send");
    this.#stop = page.getElementById("stop");
    this.#notice = page.getElementById("editing");
    this.#onAsk = onAsk;
    this.#onAskInstead = onAskInstead;
    page.getElementById("cancel-editing").onclick = () => this.cancelEditing();
    page.getElementById("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    this.#field.addEventListener("keydown", (event) => this.#key(event));
    this.#field.addEventListener("input", () => this.#fit());
    this.#stop.onclick = () => onStop();
    page.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || page.querySelector("dialog[open]")) return; // Escape closes the dialog
      if (this.#isBusy) onStop();
      else this.cancelEditing();
    });
  }

  /** Edit a question. */
  edit(question) {
    this.#isEditing = true;
    this.#notice.hidden = false;
    this.#field.value = question;
    this.#fit();
    this.#field.focus();
  }

  /** Cancel editing. */
  cancelEditing() {
    if (!this.#isEditing) return;
    this.#endEditing();
    this.focus();
  }

  /** Show Stop instead of Send. */
  setBusy(isBusy) {
    const hadFocus = document.activeElement === this.#stop;
    this.#isBusy = isBusy;
    this.#send.hidden = isBusy;
    this.#stop.hidden = !isBusy;
    if (hadFocus) this.focus(); // a hidden button would drop the focus to nowhere
  }

  /** Be ready for the next question. */
  focus() {
    if (matchMedia("(pointer: coarse)").matches) this.#field.blur(); // its keyboard would cover the answer
    else this.#field.focus();
  }

  #key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.#ask();
  }

  #ask() {
    const isTaken = (this.#isEditing ? this.#onAskInstead : this.#onAsk)(this.#field.value);
    if (!isTaken) return;
    this.#endEditing();
    this.focus();
  }

  #endEditing() {
    this.#isEditing = false;
    this.#notice.hidden = true;
    this.#field.value = "";
    this.#fit();
  }

  #fit() {
    this.#send.disabled = !this.#field.value.trim();
    this.#field.style.height = "auto";
    this.#field.style.height = `${this.#field.scrollHeight}px`; // the style sheet bounds it
  }
}
