// Keeps one WebSocket to the server open: connects, reconnects with a bounded back-off, sends and
// receives JSON.

export const ConnectionState = Object.freeze({
  CONNECTING: "connecting",
  OPEN: "open",
  WAITING: "waiting", // for the end of the back-off
});

const FIRST_DELAY_MS = 400; // a restarted server is often back within half a second
const LONGEST_DELAY_MS = 10_000; // users who wait longer press "Try now"
const CONNECT_DEADLINE_MS = 8_000; // a host that drops packets gives no error
const STEADY_AFTER_MS = 5_000; // shorter connections count as failures (a server may accept and close)

/**
 * How long to wait before the next try.
 *
 * @param {number} failures tries that have failed in a row, 0 at first.
 * @param {number} random in [0, 1): spreads the clients of a restarted server.
 */
export function backoffMs(failures, random) {
  const ceiling = Math.min(LONGEST_DELAY_MS, FIRST_DELAY_MS * 2 ** failures);
  return ceiling * (0.5 + random / 2);
}

export class Connection {
  #url;
  #protocols;
  #onState;
  #onEvent;
  #socket = null;
  #state = ConnectionState.WAITING;
  #failures = 0;
  #openedAt = 0;
  #timer = 0;
  #waiters = new Set();
  #isRefused = false;

  /**
   * @param {string} url ws: or wss:
   * @param {() => string[]} protocols the subprotocols of each try.
   * @param {{onState: (state: string, closeCode?: number) => void, onEvent: (event: object) => void}} listener
   *   the close code comes with WAITING, when the other side gave one.
   */
  constructor(url, protocols, { onState, onEvent }) {
    this.#url = url;
    this.#protocols = protocols;
    this.#onState = onState;
    this.#onEvent = onEvent;
  }

  get isOpen() {
    return this.#state === ConnectionState.OPEN;
  }

  /** Whether the server refuses this page; set by the owner. */
  get isRefused() {
    return this.#isRefused;
  }

  /** Set whether the server refuses this page. If it does, pending waits end at once. */
  set isRefused(isRefused) {
    this.#isRefused = isRefused;
    if (isRefused) for (const waiter of [...this.#waiters]) waiter(false);
  }

  /** Connect now, without the back-off. Does nothing while a socket is open or opening. */
  connect() {
    if (this.#state !== ConnectionState.WAITING) return;
    clearTimeout(this.#timer);
    const socket = new WebSocket(this.#url, this.#protocols());
    this.#socket = socket;
    this.#timer = setTimeout(() => this.#lose(socket), CONNECT_DEADLINE_MS);
    socket.onopen = () => this.#opened(socket);
    socket.onclose = ({ code }) => this.#lose(socket, code);
    socket.onmessage = ({ data }) => this.#received(socket, data);
    this.#enter(ConnectionState.CONNECTING);
  }

  /**
   * Wait until the connection is open, hurrying it up if it is backing off.
   *
   * @returns {Promise<boolean>} false when the deadline passed first, or the server refuses.
   */
  whenOpen(deadlineMs) {
    if (this.isOpen) return Promise.resolve(true);
    this.connect();
    if (this.#isRefused) return Promise.resolve(false);
    return new Promise((resolve) => {
      const waiter = (isOpen) => {
        clearTimeout(deadline);
        this.#waiters.delete(waiter);
        resolve(isOpen);
      };
      const deadline = setTimeout(() => waiter(false), deadlineMs);
      this.#waiters.add(waiter);
    });
  }

  /** Send one event. @returns {boolean} false when there is no open connection to send it on. */
  send(event) {
    if (!this.isOpen) return false;
    this.#socket.send(JSON.stringify(event));
    return true;
  }

  /** Replace this connection by a new one, which may reach another process. */
  renew() {
    if (!this.isOpen) return;
    const socket = this.#socket;
    this.#lose(socket);
    this.connect();
  }

  #opened(socket) {
    if (socket !== this.#socket) return;
    clearTimeout(this.#timer);
    this.#openedAt = performance.now();
    this.#isRefused = false;
    this.#enter(ConnectionState.OPEN);
    for (const waiter of [...this.#waiters]) waiter(true);
  }

  #received(socket, data) {
    if (socket !== this.#socket) return;
    let event;
    try {
      event = JSON.parse(data);
    } catch {
      this.#lose(socket); // not our protocol: a fresh connection is the only safe state
      return;
    }
    this.#onEvent(event);
  }

  #lose(socket, closeCode) {
    if (socket !== this.#socket) return;
    clearTimeout(this.#timer);
    this.#socket = null;
    socket.close();
    const wasSteady = this.isOpen && performance.now() - this.#openedAt >= STEADY_AFTER_MS;
    if (wasSteady) this.#failures = 0;
    this.#timer = setTimeout(() => this.connect(), backoffMs(this.#failures, Math.random()));
    this.#failures += 1;
    this.#enter(ConnectionState.WAITING, closeCode);
  }

  #enter(state, closeCode) {
    this.#state = state;
    this.#onState(state, closeCode);
  }
}
