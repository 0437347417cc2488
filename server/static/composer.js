// The field where questions are written, and its keys. Knows what the reader typed and nothing of
// what becomes of it.

export class Composer {
  #field;
  #send;
  #stop;
  #isBusy = false;
  #onAsk;

  /**
   * @param {Document} page
   * @param {{onAsk: (question: string) => boolean, onStop: () => void}} deeds onAsk says whether it took it.
   */
  constructor(page, { onAsk, onStop }) {
    this.#field = page.getElementById("question");
    this.#send = page.getElementById("send");
    this.#stop = page.getElementById("stop");
    this.#onAsk = onAsk;
    page.getElementById("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    this.#field.addEventListener("keydown", (event) => this.#key(event));
    this.#field.addEventListener("input", () => this.#fit());
    this.#stop.onclick = () => onStop();
    page.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#isBusy) onStop();
    });
  }

  /** Show Stop in the place of Send. */
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
    if (!this.#onAsk(this.#field.value)) return;
    this.#field.value = "";
    this.#fit();
    this.focus();
  }

  #fit() {
    this.#send.disabled = !this.#field.value.trim();
    this.#field.style.height = "auto";
    this.#field.style.height = `${this.#field.scrollHeight}px`; // the style sheet bounds it
  }
}
