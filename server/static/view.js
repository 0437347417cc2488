// Shows the conversation: its turns, one redraw per frame while text streams, scrolling that follows
// unless the user scrolled away, and announcements for screen readers.

import { AnswerState } from "./answer.js";
import { TurnView } from "./turn_view.js";

const NEAR_END_PX = 48; // closer than this counts as at the end

export class View {
  #scroller;
  #welcome;
  #turns;
  #template;
  #latest;
  #announcer;
  #lastTurn = null;
  #frame = 0;
  #isFollowing = false;
  #onBusy = () => {};
  #onShow = () => {};
  #deeds = {};

  /** @param {Document} page */
  constructor(page) {
    this.#scroller = page.getElementById("scroller");
    this.#welcome = page.getElementById("welcome");
    this.#turns = page.getElementById("turns");
    this.#template = page.getElementById("turn");
    this.#latest = page.getElementById("latest");
    this.#announcer = page.getElementById("announcer");
    this.#scroller.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    this.#latest.onclick = () => this.#follow();
    // A phone's keyboard or a longer question must not hide the end of the answer.
    new ResizeObserver(() => this.#isFollowing && this.#toEnd()).observe(this.#scroller);
  }

  /**
   * @param {{onRegenerate: () => void, onEdit: (question: string) => void, onNewChat: () => void,
   *   onBusy: (isBusy: boolean) => void, onShow: () => void}} deeds
   */
  connect({ onBusy, onShow, ...deeds }) {
    this.#deeds = deeds;
    this.#onShow = onShow;
    this.#onBusy = onBusy;
  }

  /** Show another conversation. */
  show(conversation) {
    this.#clear();
    for (const turn of conversation.turns) this.addTurn(turn);
    this.#onBusy(conversation.isAnswering);
    this.#onShow();
    this.#announce(conversation.isEmpty ? "New chat." : `Chat: ${conversation.title}`);
    if (!conversation.isEmpty) this.#follow();
  }

  addTurn({ question, answer }) {
    this.#welcome.hidden = true;
    this.#lastTurn = new TurnView(this.#template, question, this.#deeds);
    if (answer) this.#lastTurn.show(answer);
    this.#turns.append(this.#lastTurn.root);
  }

  /** Replace the last turn by this one. */
  replaceTurn(turn) {
    this.#lastTurn.root.remove();
    this.addTurn(turn);
  }

  startAnswer(answer) {
    cancelAnimationFrame(this.#frame);
    this.#onBusy(true);
    this.#announce("The model is answering.");
    this.#lastTurn.show(answer);
    this.#follow();
  }

  /** Show changes at the next frame. */
  showAnswer(answer) {
    cancelAnimationFrame(this.#frame);
    this.#frame = requestAnimationFrame(() => this.#draw(answer));
  }

  endAnswer(answer) {
    cancelAnimationFrame(this.#frame);
    this.#draw(answer);
    this.#announce(spoken(answer));
    this.#onBusy(false);
  }

  #clear() {
    cancelAnimationFrame(this.#frame);
    this.#turns.replaceChildren();
    this.#lastTurn = null;
    this.#welcome.hidden = false;
    this.#latest.hidden = true;
    this.#isFollowing = false;
    this.#scroller.scrollTop = 0;
  }

  #draw(answer) {
    this.#lastTurn.show(answer);
    if (this.#isFollowing) this.#toEnd();
    else this.#scrolled();
  }

  #announce(words) {
    this.#announcer.textContent = words;
  }

  #follow() {
    this.#isFollowing = true;
    this.#latest.hidden = true;
    this.#toEnd();
  }

  #toEnd() {
    this.#scroller.scrollTop = this.#scroller.scrollHeight;
  }

  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.#scroller;
    this.#isFollowing = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    this.#latest.hidden = this.#isFollowing;
  }
}

function spoken(answer) {
  // A failed answer is announced by its alert.
  if (answer.state === AnswerState.FAILED) return "";
  if (answer.state === AnswerState.STOPPED) return "Stopped.";
  return answer.text;
}
