/**
 * The server's IO thread: it owns the socket, keeps the books and enforces deadlines, so that an environment that hangs
 * cannot silence it. It runs in a worker thread (`hubThread`); methods run in the main thread.
 */

import { unlinkSync, mkdtempSync, rmdirSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { Context, Reply, Router } from "zeromq";
import { Book, type Call } from "./book.js";
import { letIn, ZAP_ADDRESS, ZAP_DOMAIN, type ServerKeys } from "./curve.js";
import { describe, LongstepError, ProtocolError } from "./errors.js";
import { checkAddress, Kind, packHead, tokenKey, unpackHead, WrongVersionError, type Head } from "./heads.js";
import { LIMITS } from "./limits.js";
import type { Value } from "./values.js";

/** What a server offers and grants. */
export interface Terms {
  service: string;
  version: number;
  methods: string[];
  /** ipc://path or tcp://host:port, with * for a free port; null makes a private ipc address. */
  address: string | null;
  numCredits: number;
  heartbeatS: number;
  lostAfterS: number;
  maxSessions: number;
  parentPid: number | null;
  /** Required for an address that other machines can reach. */
  keys: ServerKeys | null;
}

/** What the hub tells the main thread. */
export type FromHub =
  | { type: "bound"; address: string }
  | { type: "failed"; kind: string; message: string }
  | { type: "call"; id: number; session: number; method: string; frames: Uint8Array[] }
  | { type: "close"; session: number }
  | { type: "orphaned" }
  | { type: "stopped" };

/** What the main thread tells the hub. An answer is frames, or kind, message and place of an error. */
export type ToHub =
  | { type: "answer"; id: number; frames?: Uint8Array[]; error?: [string, string, string] }
  | { type: "returned"; id: number }
  | { type: "stop" };

const TICK_MS = 50;
const PREFIX = "longstep-ipc-";

export class Hub {
  private readonly socket: Router;
  private readonly guard: Reply | null = null;
  private readonly books = new Map<string, Book>();
  private readonly calls = new Map<number, Call>();
  private readonly outbox: Uint8Array[][] = [];
  private isSending = false;
  private isStopped = false;
  private lastNumber = 0;
  private address = "";

  constructor(
    private readonly terms: Terms,
    private readonly tell: (message: FromHub) => void,
  ) {
    const queueLength = 4 * terms.numCredits + 64;
    const context = new Context(); // there can be only one guard in a context
    const { keys } = terms;
    const secured = keys && { curveServer: true, curveSecretKey: keys.secretKey, zapDomain: ZAP_DOMAIN };
    if (keys !== null) this.guard = new Reply({ context, linger: 0 });
    this.socket = new Router({
      context,
      ...secured,
      mandatory: true,
      linger: 0,
      sendTimeout: 0,
      sendHighWaterMark: queueLength,
      receiveHighWaterMark: queueLength,
      maxMessageSize: Math.max(LIMITS.max_body_bytes, LIMITS.max_frame_bytes),
      ipv6: (terms.address ?? "").includes("["),
    });
  }

  /** Bind and serve until `take` gets a stop. */
  async run(): Promise<void> {
    try {
      const { address, keys } = this.terms;
      if (address !== null) checkAddress(address, keys !== null);
      if (this.guard !== null && keys !== null) {
        await this.guard.bind(ZAP_ADDRESS);
        void letIn(this.guard, keys.allowed);
      }
      await this.socket.bind(this.terms.address ?? `ipc://${mkdtempSync(join(tmpdir(), `${PREFIX}${process.pid}-`))}/s`);
    } catch (error) {
      const kind = error instanceof LongstepError ? error.kind : "ConfigError";
      this.tell({ type: "failed", kind, message: (error as Error).message });
      this.socket.close();
      this.guard?.close();
      return;
    }
    this.address = this.socket.lastEndpoint as string;
    this.tell({ type: "bound", address: this.address });
    const timer = setInterval(() => this.keepTime(performance.now()), TICK_MS);
    try {
      for await (const [route, ...frames] of this.socket) this.receive(route as Buffer, frames);
    } finally {
      clearInterval(timer);
      this.guard?.close();
      this.tidy();
      this.tell({ type: "stopped" });
    }
  }

  /** Do what the main thread says. */
  take(message: ToHub): void {
    if (message.type === "stop") {
      this.stop();
      return;
    }
    const call = this.calls.get(message.id);
    if (call === undefined) return;
    const book = call.book;
    if (message.type === "answer") {
      this.calls.delete(message.id);
      if (book.isOpen(call)) this.answer(call, message.error ?? (message.frames as Uint8Array[]));
    }
    if (book.running === call) {
      book.running = null;
      if (book.dropped) this.tell({ type: "close", session: book.number });
      else this.advance(book);
    }
  }

  private stop(): void {
    if (this.isStopped) return;
    this.isStopped = true;
    for (const book of this.books.values()) this.send(book.route, [packHead(Kind.BYE, book.token, "the server stops")]);
    setTimeout(() => this.socket.close(), 20); // the goodbyes have been handed over by then
  }

  private tidy(): void {
    if (!this.address.startsWith("ipc://")) return;
    const path = this.address.slice("ipc://".length);
    try {
      unlinkSync(path);
    } catch {} // removed already
    try {
      if (dirname(path).includes(PREFIX)) rmdirSync(dirname(path));
    } catch {}
  }

  private receive(route: Uint8Array, frames: Uint8Array[]): void {
    try {
      const size = frames.reduce((sum, frame) => sum + frame.byteLength, 0);
      if (frames.length === 0 || frames.length > LIMITS.max_frames + 2 || size > LIMITS.max_message_bytes)
        throw new ProtocolError("expected a message within the limits");
      this.obey(route, unpackHead(frames[0] as Uint8Array), frames.slice(1));
    } catch (error) {
      if (error instanceof WrongVersionError) this.refuse(route, error.token, error);
      else if (!(error instanceof ProtocolError)) throw error;
    }
  }

  private obey(route: Uint8Array, head: Head, frames: Uint8Array[]): void {
    const book = this.books.get(tokenKey(head.token));
    if (head.kind === Kind.HELLO) {
      this.hello(route, head, book);
      return;
    }
    if (book === undefined) {
      const said = "the server does not know this session: it restarted, or gave the client up";
      if (head.kind !== Kind.BYE) this.send(route, [packHead(Kind.LOST, head.token, said)]);
      return;
    }
    book.route = route;
    book.heardAt = performance.now();
    if (head.kind === Kind.REQUEST) this.request(book, head, frames);
    else if (head.kind === Kind.PING) this.ping(book, head);
    else if (head.kind === Kind.CANCEL) book.forget(head.fields[0]);
    else if (head.kind === Kind.BYE) this.drop(book);
    else throw new ProtocolError("expected a message from a client");
    if (!book.dropped) this.advance(book);
  }

  // ---- sessions ----

  private hello(route: Uint8Array, head: Head, known: Book | undefined): void {
    let book = known;
    if (book === undefined) {
      try {
        book = this.open(head);
      } catch (error) {
        this.refuse(route, head.token, error);
        return;
      }
    }
    book.route = route;
    book.heardAt = performance.now();
    const welcome: Value = {
      service: this.terms.service,
      service_version: this.terms.version,
      methods: [...this.terms.methods].sort(),
      pid: process.pid,
      num_credits: this.terms.numCredits,
      heartbeat_ms: Math.round(1000 * this.terms.heartbeatS),
      lost_after_ms: Math.round(1000 * this.terms.lostAfterS),
      limits: { ...LIMITS },
    };
    this.send(route, [packHead(Kind.WELCOME, head.token, welcome)]);
  }

  private open(head: Head): Book {
    const { name, service, service_version: version } = head.fields[0];
    if (typeof name !== "string" || name.length < 1 || name.length > 200)
      throw new ProtocolError("expected a name of 1 to 200 characters in HELLO");
    if (service !== this.terms.service || version !== this.terms.version)
      throw new LongstepError(
        "ConfigError",
        `expected a client of \`${this.terms.service}\` version ${this.terms.version}, got one of ` +
          `${String(service).slice(0, 80)} version ${String(version).slice(0, 40)}; check the address`,
      );
    if ([...this.books.values()].some((book) => book.name === name))
      throw new LongstepError("ConfigError", `expected a client name that is not in use, got \`${name}\``);
    if (this.books.size >= this.terms.maxSessions)
      throw new LongstepError("ConfigError", `expected at most ${this.terms.maxSessions} clients, got one more`);
    const book = new Book(++this.lastNumber, name, head.token, this.terms.numCredits);
    this.books.set(tokenKey(head.token), book);
    return book;
  }

  private drop(book: Book): void {
    this.books.delete(tokenKey(book.token));
    book.dropped = true;
    for (const seq of [...book.calls.keys()]) book.forget(seq);
    if (book.running === null) this.tell({ type: "close", session: book.number });
  }

  // ---- requests ----

  private request(book: Book, head: Head, frames: Uint8Array[]): void {
    const [seq, upto, open, remainingMs, method] = head.fields;
    book.settle(upto, open);
    if (book.answers.has(seq)) {
      this.sendAnswer(book, seq);
    } else if (book.isNew(seq, open)) {
      const deadline = performance.now() + remainingMs;
      const call: Call = { id: ++this.lastNumber, book, seq, method, deadline, frames };
      book.add(call, open);
      if (!this.terms.methods.includes(method)) {
        const known = this.terms.methods.join(", ");
        this.answer(call, ["RegistryError", `expected one of the methods ${known}, got \`${method.slice(0, 200)}\``, ""]);
      } else if (book.lost) {
        this.answer(call, ["SessionLostError", book.lost, ""]);
      }
    }
  }

  private ping(book: Book, head: Head): void {
    const [number, upto, open] = head.fields;
    book.settle(upto, open);
    const longAgo = performance.now() - 500 * this.terms.heartbeatS;
    for (const [seq, { sentAt }] of book.answers) if (sentAt < longAgo) this.sendAnswer(book, seq);
    const here = [...book.calls.keys()].sort((a, b) => a - b);
    this.send(book.route, [packHead(Kind.PONG, book.token, number, here)]);
  }

  private advance(book: Book): void {
    const call = book.nextCall();
    if (call === null) return;
    this.calls.set(call.id, call);
    this.tell({ type: "call", id: call.id, session: book.number, method: call.method, frames: call.frames });
  }

  private answer(call: Call, outcome: Uint8Array[] | [string, string, string]): void {
    const { book, seq } = call;
    const frames =
      typeof outcome[0] === "string"
        ? [packHead(Kind.ERROR, book.token, seq, ...(outcome as [string, string, string]))]
        : [packHead(Kind.REPLY, book.token, seq), ...(outcome as Uint8Array[])];
    book.waiting.delete(seq);
    book.answers.set(seq, { sentAt: 0, frames });
    this.sendAnswer(book, seq);
  }

  private keepTime(now: number): void {
    if (this.terms.parentPid !== null && process.ppid !== this.terms.parentPid) this.orphaned();
    for (const book of [...this.books.values()]) {
      if (now - book.heardAt > 1000 * this.terms.lostAfterS) {
        this.drop(book);
        continue;
      }
      const late = [...book.calls.values()].filter((call) => call.deadline <= now && book.isOpen(call));
      for (const call of late) if (book.isOpen(call)) this.expire(book, call);
      if (late.length > 0) this.advance(book);
    }
  }

  private expire(book: Book, call: Call): void {
    const fail = (late: Call, kind: string, said: string): void => this.answer(late, [kind, said, ""]);
    if (book.running === call) {
      const said = `\`${call.method}\` still ran at its deadline; the session's state is unknown now`;
      fail(call, "DeadlineError", said);
      book.lost = `an earlier call of ${said}; open a new session`;
      for (const waiting of [...book.waiting.values()]) fail(waiting, "SessionLostError", book.lost);
    } else if (book.waiting.has(call.seq)) {
      fail(call, "DeadlineError", `\`${call.method}\` was not executed: its deadline passed while it waited its turn`);
    } else {
      fail(call, "DeadlineError", `\`${call.method}\` gave no answer within its deadline`);
    }
  }

  private orphaned(): void {
    if (this.isStopped) return;
    this.tell({ type: "orphaned" });
    this.stop();
    setTimeout(() => {
      this.tidy();
      process.kill(process.pid, "SIGKILL"); // the main thread hangs
    }, 3000);
  }

  // ---- sending ----

  private sendAnswer(book: Book, seq: number): void {
    const answer = book.answers.get(seq);
    if (answer === undefined) return;
    answer.sentAt = performance.now();
    this.send(book.route, answer.frames);
  }

  private refuse(route: Uint8Array, token: Uint8Array, error: unknown): void {
    const [kind, message] = describe(error);
    this.send(route, [packHead(Kind.REFUSED, token, kind, message)]);
  }

  private send(route: Uint8Array, frames: Uint8Array[]): void {
    this.outbox.push([route, ...frames]);
    if (!this.isSending) void this.flush();
  }

  private async flush(): Promise<void> {
    this.isSending = true;
    for (let next = this.outbox.shift(); next !== undefined; next = this.outbox.shift()) {
      try {
        await this.socket.send(next);
      } catch {} // the peer's queue is full or it is gone; what matters is kept and asked for again
    }
    this.isSending = false;
  }
}
