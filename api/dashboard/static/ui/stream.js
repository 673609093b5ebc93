/** One live connection per page: server-sent events, resumed by id, with its state told to whoever asks. */

import { signIn } from "./api.js";

const TYPES = ["state", "metric", "bound", "search", "span", "log", "artifact", "progress"];
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
    this.connect();
  }

  connect() {
    this.listener.state(this.failures ? "reconnecting" : "connecting");
    const source = new EventSource(this.url(this.last));
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
    this.listener.state("reconnecting");
    this.failures += 1;
    if (source.readyState !== EventSource.CLOSED || source !== this.source) return;
    const wait = PATIENCE_MS[Math.min(this.failures - 1, PATIENCE_MS.length - 1)];
    this.timer = window.setTimeout(() => void this.again(), wait);
  }

  /** Asks first whether the session still holds, since an EventSource does not tell why it was refused. */
  async again() {
    const probe = await fetch("/v1/jobs?limit=1", { credentials: "same-origin" }).catch(() => null);
    if (probe?.status === 401) signIn();
    else this.connect();
  }

  /** @param {StreamState} [state] */
  close(state) {
    window.clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
    if (state) this.listener.state(state);
  }
}
