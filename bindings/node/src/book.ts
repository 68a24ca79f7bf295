/** What has arrived in a session, what runs, and which answers are kept. PROTOCOL.md, section 5. */

import { ProtocolError } from "./errors.js";

export interface Call {
  readonly id: number;
  readonly book: Book;
  readonly seq: number;
  readonly method: string;
  /** On the clock of `performance.now`. */
  readonly deadline: number;
  readonly frames: Uint8Array[];
}

export class Book {
  route: Uint8Array = new Uint8Array();
  heardAt = 0;
  /** The call whose method has not returned. */
  running: Call | null = null;
  /** Why nothing more is executed; empty while all is well. */
  lost = "";
  dropped = false;
  readonly calls = new Map<number, Call>();
  readonly waiting = new Map<number, Call>();
  readonly answers = new Map<number, { sentAt: number; frames: Uint8Array[] }>();
  private missing = new Set<number>();
  private highest = 0;

  constructor(
    readonly number: number,
    readonly name: string,
    readonly token: Uint8Array,
    private readonly numCredits: number,
  ) {}

  /** Forget every request up to `upto` that the client no longer waits for. */
  settle(upto: number, open: readonly number[]): void {
    const still = new Set(open);
    for (const seq of [...this.calls.keys()]) if (seq <= upto && !still.has(seq)) this.forget(seq);
    this.missing = new Set([...this.missing].filter((seq) => seq > upto || still.has(seq)));
  }

  /** Drop one request: an answered one with its answer, a waiting one unexecuted. */
  forget(seq: number): void {
    this.calls.delete(seq);
    this.waiting.delete(seq);
    this.answers.delete(seq);
  }

  /** Whether a request has not arrived before and is still wanted. */
  isNew(seq: number, open: readonly number[]): boolean {
    if (open.length > this.numCredits) throw new ProtocolError(`expected at most ${this.numCredits} requests in flight`);
    if (this.calls.has(seq) || !open.includes(seq)) return false;
    return seq > this.highest || this.missing.has(seq);
  }

  /** Take in a new request; numbers skipped before it are missing if the client still waits for them. */
  add(call: Call, open: readonly number[]): void {
    if (call.seq > this.highest) {
      for (const seq of open) if (seq > this.highest && seq < call.seq) this.missing.add(seq);
      this.highest = call.seq;
    }
    this.missing.delete(call.seq);
    this.calls.set(call.seq, call);
    this.waiting.set(call.seq, call);
  }

  /** The call to execute now, which becomes `running`; null while one runs, none waits, or one is missing. */
  nextCall(): Call | null {
    if (this.running !== null || this.waiting.size === 0) return null;
    const seq = Math.min(...this.waiting.keys());
    if (this.missing.size > 0 && Math.min(...this.missing) < seq) return null;
    this.running = this.waiting.get(seq) as Call;
    this.waiting.delete(seq);
    return this.running;
  }

  /** Whether a call still needs an answer. */
  isOpen(call: Call): boolean {
    return this.calls.get(call.seq) === call && !this.answers.has(call.seq);
  }
}
