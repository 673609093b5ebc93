/**
 * One live connection per page that is seen: server-sent events, resumed by id, with its state told to whoever asks. A
 * browser has six connections to a service for all its tabs, and hidden ones would keep those that others load by.
 */

import { Problem, admitted } from "./api.js";

const TYPES = ["state", "metric", "bound", "search", "span", "log", "artifact", "progress", "phase"];
const PATIENCE_MS = [500, 1000, 2000, 4000, 8000];

/**
 * @typedef {"connecting" | "live" | "reconnecting" | "ended"} StreamState
 *
 * @typedef {object} Listener
 * @property {(event: import("../lib/types.js").StreamedEvent) => void} event
 * @property {(state: StreamState) => void} state
 * @property {() => void} gap the server no longer holds what was missed: fetch everything again
 * @property {() => void} [open] connected, for the first time or again
 */

export class Stream {
  /**
   * @param {(after: string | null) => string} url where to connect, given the last id seen
   * @param {Listener} listener
   */
  constructor(url, listener) {
    this.url = url;
    this.listener = listener;
    /** @type {string | null} */
    this.last = null;
    /** @type {EventSource | null} */
    this.source = null;
    this.failures = 0;
    /** @type {number | undefined} */
    this.timer = undefined;
    this.closed = false;
    this.turn = 0;
    this.seen = () => (document.hidden ? this.disconnect() : void this.connect());
    document.addEventListener("visibilitychange", this.seen);
    void this.connect();
  }

  /** Asks to be admitted first, which leaves for the sign-in page when the session is over. */
  async connect() {
    this.disconnect();
    const mine = this.turn;
    if (document.hidden) return;
    this.listener.state(this.failures ? "reconnecting" : "connecting");
    let path;
    try {
      path = await admitted(this.url(this.last));
    } catch (error) {
      if (mine === this.turn && (!(error instanceof Problem) || error.status !== 401)) this.later();
      return;
    }
    if (mine === this.turn) this.listen(new EventSource(path));
  }

  /** Until it is to connect again, or for good. */
  disconnect() {
    this.turn += 1;
    window.clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  /** @param {EventSource} source */
  listen(source) {
    this.source = source;
    source.addEventListener("open", () => this.opened());
    source.addEventListener("message", (message) => this.received(message));
    for (const type of TYPES) source.addEventListener(type, (message) => this.received(message));
    source.addEventListener("gap", () => this.listener.gap());
    source.addEventListener("end", () => this.close("ended"));
    source.addEventListener("error", (event) => {
      if (event instanceof MessageEvent) this.received(event);
      else this.failed(source);
    });
  }

  opened() {
    this.failures = 0;
    this.listener.state("live");
    this.listener.open?.();
  }

  /** @param {MessageEvent<string>} message */
  received(message) {
    if (message.lastEventId) this.last = message.lastEventId;
    const body = JSON.parse(message.data);
    const event = body.event ?? body;
    this.listener.event({ id: message.lastEventId, job: body.job ?? event.job ?? null, event });
  }

  /**
   * A broken connection is retried by the browser; one that was refused (the server is starting) is retried here.
   * @param {EventSource} source
   */
  failed(source) {
    if (source !== this.source) return;
    if (source.readyState === EventSource.CLOSED) this.later();
    else {
      this.listener.state("reconnecting");
      this.failures += 1;
    }
  }

  /** Connects again after a while. */
  later() {
    if (this.closed) return;
    this.listener.state("reconnecting");
    this.failures += 1;
    const wait = PATIENCE_MS[Math.min(this.failures - 1, PATIENCE_MS.length - 1)];
    this.timer = window.setTimeout(() => void this.connect(), wait);
  }

  /** @param {StreamState} [state] */
  close(state) {
    this.closed = true;
    document.removeEventListener("visibilitychange", this.seen);
    this.disconnect();
    if (state) this.listener.state(state);
  }
}
