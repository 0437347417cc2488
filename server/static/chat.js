// What the reader can do in a chat: ask, stop, regenerate, ask differently. Joins conversations, the
// connection and the view; touches neither the socket, nor the storage, nor the page itself. Answers
// go on when another conversation is shown, and when their connection is replaced.

import { Answer, endsResponse } from "./answer.js";

const CONNECT_WAIT_MS = 10_000; // then a question says that the server cannot be reached
const MESSAGE_TOO_BIG = 1009; // the WebSocket's close code

export class Chat {
  #connection;
  #model;
  #view;
  #parameters;
  #onChange;
  #conversation = null; // the one that is shown
  #open = new Map(); // by stream_id: what the server has not ended; stopped answers too
  #lanes = 0;
  #isServerLeaving = false;

  /**
   * @param {Connection} connection
   * @param {{name: (picked: string|null) => Promise<string|null>}} model the one to ask.
   * @param {View} view
   * @param {() => object} parameters what each question carries.
   * @param {(conversation: Conversation) => void} onChange told when one has grown, or its answer ended.
   */
  constructor(connection, model, view, parameters, onChange) {
    this.#connection = connection;
    this.#model = model;
    this.#view = view;
    this.#parameters = parameters;
    this.#onChange = onChange;
  }

  /** Go to another conversation; what is under way in this one goes on. */
  show(conversation) {
    this.#conversation = conversation;
    this.#view.show(conversation);
  }

  /** The model that was picked for what is shown, null for none. */
  get model() {
    return this.#conversation?.model ?? null;
  }

  /** Ask this model from now on in what is shown. */
  pick(model) {
    this.#conversation.model = model;
    if (!this.#conversation.isEmpty) this.#onChange(this.#conversation);
  }

  /** Ask a question, unless an answer is under way. @returns {boolean} whether it was taken. */
  ask(question) {
    if (this.#conversation.isAnswering || !question.trim()) return false;
    this.#view.addTurn(this.#conversation.add(question.trim(), Date.now()));
    this.#begin();
    return true;
  }

  /** Ask this in the place of the last question. @returns {boolean} whether it was taken. */
  askInstead(question) {
    if (this.#conversation.isAnswering || this.#conversation.isEmpty || !question.trim()) return false;
    this.#conversation.replaceLast(question.trim(), Date.now());
    this.#view.replaceTurn(this.#conversation.last);
    this.#begin();
    return true;
  }

  /** Answer the last question again. */
  regenerate() {
    if (this.#conversation.isAnswering || this.#conversation.isEmpty) return;
    this.#begin();
  }

  /** End the answer that is under way and keep what there is of it. */
  stop(conversation = this.#conversation) {
    if (!conversation.isAnswering) return;
    const { answer } = conversation.last;
    if (answer.lane) this.#cancel(answer);
    answer.stop();
    this.#ended(answer, conversation);
  }

  /**
   * The page goes away, maybe to be loaded again. What has no name yet ends here.
   *
   * @returns {object[]} what `resume` takes, of each answer that can go on.
   */
  leave() {
    const notes = [];
    for (const { answer, conversation } of [...this.#open.values()]) {
      if (answer.isOver) continue;
      if (answer.canResume) {
        notes.push({ chat: conversation.id, ...answer.whereabouts });
        this.#onChange(conversation);
      } else if (conversation.last?.answer === answer) {
        this.stop(conversation);
      }
    }
    return notes;
  }

  /** Go on with the last answer of a conversation, which the page was left with. */
  resume(conversation, note) {
    const answer = conversation.resumeLast(note);
    if (!answer) return;
    this.#lanes = Math.max(this.#lanes, Number(note.lane.split("-")[1]) || 0);
    this.#open.set(note.lane, { answer, conversation, request: {} });
  }

  /** Take in an event of the server. */
  receive(event) {
    const now = performance.now();
    if (event.type === "notice") this.#noticed(event);
    const lane = event.stream_id ?? this.#shownLane; // what has no lane is about the connection
    const entry = this.#open.get(lane);
    if (!entry) return;
    const { answer, conversation } = entry;
    if (endsResponse(event)) this.#open.delete(lane);
    if (answer.isOver) {
      this.#receiveLate(entry, event, now);
    } else if (isWithoutRoomToResume(event) && entry.request.resumable) {
      this.#send(entry, { ...entry.request, resumable: false });
    } else {
      answer.receive(named(event, answer), now);
      if (answer.isOver) this.#ended(answer, conversation);
      else if (conversation === this.#conversation) this.#view.showAnswer(answer);
    }
    this.#renewIfIdle();
  }

  /** The connection is gone: what has a name goes on with the next one, the rest is lost. */
  lost(closeCode) {
    this.#isServerLeaving = false;
    for (const [lane, { answer, conversation }] of this.#open) {
      if (answer.canResume && closeCode !== MESSAGE_TOO_BIG) {
        answer.interrupt();
        if (conversation === this.#conversation) this.#view.showAnswer(answer);
        continue;
      }
      this.#open.delete(lane);
      if (answer.isOver) continue;
      answer.fail(closeCode === MESSAGE_TOO_BIG ? { status: 413 } : { code: "connection_lost" });
      this.#ended(answer, conversation);
    }
  }

  /** There is a connection again. */
  reconnected() {
    for (const { answer, conversation } of this.#open.values()) {
      if (!answer.isInterrupted) continue;
      this.#connection.send(answer.resumption());
      if (answer.isOver) this.#cancel(answer); // stopped while nobody could be told
      else if (conversation === this.#conversation) this.#view.showAnswer(answer);
    }
  }

  get #shownLane() {
    return this.#conversation.isAnswering ? this.#conversation.last.answer.lane : undefined;
  }

  async #begin() {
    const conversation = this.#conversation;
    const answer = new Answer();
    conversation.last.answer = answer;
    this.#view.startAnswer(answer);
    this.#onChange(conversation);
    const isOpen = await this.#connection.whenOpen(CONNECT_WAIT_MS);
    const model = (isOpen && (await this.#model.name(conversation.model))) || undefined;
    if (answer.isOver) return; // stopped meanwhile
    answer.spokenBy(model ?? null);
    if (conversation === this.#conversation) this.#view.showAnswer(answer);
    const input = conversation.input();
    const request = { type: "response.create", model, input, store: false, resumable: true };
    this.#send({ answer, conversation }, { ...request, ...this.#parameters() });
  }

  #send({ answer, conversation }, request) {
    // A lane of its own for each try: what still comes for a stopped one cannot be mistaken.
    const lane = `answer-${++this.#lanes}`;
    if (this.#connection.send({ ...request, stream_id: lane })) {
      answer.sent(lane, performance.now());
      this.#open.set(lane, { answer, conversation, request });
      return;
    }
    answer.fail({ code: this.#connection.isRefused ? "invalid_api_key" : "unreachable" });
    this.#ended(answer, conversation);
  }

  #cancel(answer) {
    this.#connection.send({ type: "response.cancel", stream_id: answer.lane });
  }

  #receiveLate({ answer, conversation }, event, now) {
    answer.note(event);
    if (!endsResponse(event)) return;
    answer.count(event, now);
    // Regenerated or followed meanwhile: then its figures are nobody's business any more.
    if (conversation.last?.answer !== answer) return;
    this.#onChange(conversation);
    if (conversation === this.#conversation) this.#view.showAnswer(answer);
  }

  #ended(answer, conversation) {
    if (conversation === this.#conversation) this.#view.endAnswer(answer);
    this.#onChange(conversation);
  }

  #noticed({ code }) {
    this.#isServerLeaving ||= code === "draining";
    this.#renewIfIdle();
  }

  /** A server that leaves takes no more questions: whoever follows it is behind the same address. */
  #renewIfIdle() {
    if (!this.#isServerLeaving || this.#open.size > 0) return;
    this.#isServerLeaving = false;
    this.#connection.renew();
  }
}

/** The event; a lost connection's words if it says that the rest is not to be had any more. */
function named(event, answer) {
  const isGone = event.type === "error" && answer.canResume && [404, 410].includes(event.status);
  return isGone ? { ...event, error: { code: "connection_lost" } } : event;
}

/** Whether all that is refused is to keep the answer for another connection. */
function isWithoutRoomToResume({ type, error }) {
  return type === "error" && error?.code === "overloaded" && error.param === "resumable";
}
