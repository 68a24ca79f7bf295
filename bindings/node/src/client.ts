/** Calls of one server's methods, answered in any order, each exactly once or not at all. PROTOCOL.md, sections 4 and 5. */

import { randomBytes } from "node:crypto";
import { Dealer } from "zeromq";
import type { ClientKeys } from "./curve.js";
import { LongstepError, ProtocolError } from "./errors.js";
import { checkAddress, Kind, packHead, unpackHead, type Head } from "./heads.js";
import { LIMITS, type Limits } from "./limits.js";
import type { Value } from "./values.js";
import { decode, encode } from "./wire.js";

export interface ClientOptions {
  service: string;
  version: number;
  /** Unique among the server's clients; one is made up if it is not given. */
  name?: string;
  connectTimeoutS?: number;
  /** Required for an address that is not on this machine. */
  keys?: ClientKeys;
  /** Largest message taken in. */
  limits?: Readonly<Limits>;
}

interface Pending {
  method: string;
  deadline: number;
  frames: Uint8Array[];
  pingNumber: number;
  resolve: (value: Value) => void;
  reject: (error: Error) => void;
}

const TICK_MS = 50;
const HELLO_AGAIN_MS = 500;
/** How long after a deadline the server's own report of it is waited for. */
const GRACE_MS = 500;

/**
 * A session with one server. Heartbeats are sent by this thread: one that computes for longer than the server's patience
 * (10 s unless told otherwise) loses the session.
 */
export class Client {
  /** Why no call can be made any more; empty while all is well. */
  lost = "";
  private readonly socket: Dealer;
  private readonly token = randomBytes(16);
  private readonly open = new Map<number, Pending>();
  private readonly queue: Array<() => void> = [];
  private readonly outbox: Uint8Array[][] = [];
  private isSending = false;
  private timer: NodeJS.Timeout | null = null;
  private welcome: { numCredits: number; heartbeatMs: number; lostAfterMs: number; limits: Limits } | null = null;
  private onWelcome: (error: Error | null) => void = () => {};
  private seq = 0;
  private pingNumber = 0;
  private heardAt = 0;
  private helloAt = -Infinity;
  private pingAt = 0;

  private constructor(
    readonly address: string,
    private readonly options: ClientOptions,
  ) {
    const { keys } = options;
    checkAddress(address, keys !== undefined);
    this.socket = new Dealer({
      ...(keys && {
        curvePublicKey: keys.publicKey,
        curveSecretKey: keys.secretKey,
        curveServerKey: keys.serverKey,
      }),
      immediate: true,
      linger: 0,
      reconnectInterval: 50,
      reconnectMaxInterval: 1000,
      maxMessageSize: Math.max(this.limits.max_body_bytes, this.limits.max_frame_bytes),
      ipv6: address.includes("["),
    });
  }

  private get limits(): Readonly<Limits> {
    return this.options.limits ?? LIMITS;
  }

  /** Connect and shake hands. */
  static async connect(address: string, options: ClientOptions): Promise<Client> {
    const client = new Client(address, options);
    const timeoutS = options.connectTimeoutS ?? 10;
    const welcomed = new Promise<void>((resolve, reject) => {
      client.onWelcome = (error) => (error === null ? resolve() : reject(error));
      setTimeout(() => {
        reject(new LongstepError("DeadlineError", `expected a server at ${address} within ${timeoutS} s, got no answer`));
      }, 1000 * timeoutS).unref();
    });
    client.socket.connect(address);
    void client.receive();
    client.timer = setInterval(() => client.keepTime(performance.now()), TICK_MS);
    client.keepTime(performance.now());
    try {
      await welcomed;
    } catch (error) {
      await client.close();
      throw error;
    }
    return client;
  }

  /** The value that a method gives; rejects with what the method raised, or with why there is no answer. */
  call(method: string, value: Value = null, { timeoutS }: { timeoutS: number }): Promise<Value> {
    return new Promise((resolve, reject) => {
      const deadline = performance.now() + 1000 * timeoutS;
      const frames = encode(value, this.welcome?.limits ?? LIMITS);
      const start = (): void => {
        if (this.lost) {
          reject(new LongstepError("SessionLostError", this.lost));
          return;
        }
        const pending = { method, deadline, frames, pingNumber: 0, resolve, reject };
        this.open.set(++this.seq, pending);
        this.sendRequest(this.seq, pending);
      };
      if (this.open.size < (this.welcome?.numCredits ?? 0) || this.lost) start();
      else this.queue.push(start);
    });
  }

  /** Say goodbye and free the socket; what is in flight is rejected. */
  async close(): Promise<void> {
    if (this.timer === null) return;
    clearInterval(this.timer);
    this.timer = null;
    this.lose("this client was closed");
    if (this.welcome !== null) {
      this.outbox.length = 0;
      this.post([packHead(Kind.BYE, this.token, "closed")]);
      await new Promise((resolve) => setTimeout(resolve, 20));
      this.socket.linger = 200;
    }
    this.socket.close();
  }

  private async receive(): Promise<void> {
    try {
      for await (const frames of this.socket) this.take(frames);
    } catch (error) {
      this.lose(`the client's socket failed: ${String(error)}`);
    }
  }

  private take(frames: Uint8Array[]): void {
    let head: Head;
    try {
      head = unpackHead(frames[0] ?? new Uint8Array());
    } catch (error) {
      if (this.welcome === null) this.onWelcome(error as Error);
      return; // once there has been a handshake, a bad message is passed over and asked for again
    }
    if (Buffer.compare(head.token, this.token) !== 0) return;
    this.heardAt = performance.now();
    const { kind, fields } = head;
    if (kind === Kind.REPLY) this.finish(fields[0], frames.slice(1), null);
    else if (kind === Kind.ERROR)
      this.finish(fields[0], [], new LongstepError(fields[1], `${fields[2]} (from ${fields[3]} at ${this.address})`));
    else if (kind === Kind.PONG) this.resend(fields[0], new Set(fields[1]));
    else if (kind === Kind.WELCOME) this.welcomed(fields[0]);
    else if (kind === Kind.REFUSED) this.onWelcome(new LongstepError(fields[0], fields[1]));
    else if (kind === Kind.LOST || kind === Kind.BYE) this.lose(`${fields[0]} (${this.address})`);
  }

  private welcomed(terms: { [key: string]: Value }): void {
    if (this.welcome !== null) return;
    const limits = terms["limits"] as unknown as Limits;
    const numbers = ["num_credits", "heartbeat_ms", "lost_after_ms"].map((name) => terms[name]);
    const isPositive = (number: unknown): boolean => Number.isInteger(number) && (number as number) > 0;
    if (!numbers.every(isPositive) || !Object.keys(LIMITS).every((name) => isPositive(limits?.[name as keyof Limits]))) {
      this.onWelcome(new ProtocolError("expected complete terms in WELCOME"));
      return;
    }
    const [numCredits, heartbeatMs, lostAfterMs] = numbers as [number, number, number];
    this.welcome = { numCredits, heartbeatMs, lostAfterMs, limits };
    this.onWelcome(null);
  }

  private resend(number: number, here: Set<number>): void {
    for (const [seq, pending] of this.open)
      if (pending.pingNumber < number && !here.has(seq)) this.sendRequest(seq, pending);
  }

  private finish(seq: number, frames: Uint8Array[], error: Error | null): void {
    const pending = this.open.get(seq);
    if (pending === undefined) return;
    this.open.delete(seq);
    try {
      if (error !== null) pending.reject(error);
      else pending.resolve(decode(frames, this.limits));
    } catch (malformed) {
      pending.reject(malformed as Error);
    }
    this.queue.shift()?.();
  }

  private lose(why: string): void {
    this.lost ||= why;
    for (const seq of [...this.open.keys()]) this.finish(seq, [], new LongstepError("SessionLostError", this.lost));
  }

  private keepTime(now: number): void {
    if (this.lost) return;
    const idle = this.outbox.length === 0 && !this.isSending;
    if (this.welcome === null) {
      if (now - this.helloAt > HELLO_AGAIN_MS && idle) {
        this.helloAt = now;
        const { service, version } = this.options;
        const name = this.options.name ?? `node-${process.pid}-${this.token.toString("hex").slice(0, 12)}`;
        this.post([packHead(Kind.HELLO, this.token, { name, service, service_version: version })]);
      }
      return;
    }
    if (now - this.pingAt >= this.welcome.heartbeatMs && idle) {
      this.pingAt = now;
      this.post([packHead(Kind.PING, this.token, ++this.pingNumber, this.seq, [...this.open.keys()])]);
    }
    if (now - this.heardAt > this.welcome.lostAfterMs)
      this.lose(`no sign of life from ${this.address} for ${this.welcome.lostAfterMs / 1000} s`);
    for (const [seq, { method, deadline }] of [...this.open])
      if (now > deadline + GRACE_MS)
        this.finish(seq, [], new LongstepError("DeadlineError", `\`${method}\` got no answer from ${this.address} within its deadline`));
  }

  private sendRequest(seq: number, pending: Pending): void {
    pending.pingNumber = this.pingNumber;
    const remainingMs = Math.max(0, Math.floor(pending.deadline - performance.now()));
    const head = packHead(Kind.REQUEST, this.token, seq, this.seq, [...this.open.keys()], remainingMs, pending.method);
    this.post([head, ...pending.frames]);
  }

  private post(frames: Uint8Array[]): void {
    this.outbox.push(frames);
    if (!this.isSending) void this.flush();
  }

  private async flush(): Promise<void> {
    this.isSending = true;
    for (let next = this.outbox.shift(); next !== undefined; next = this.outbox.shift()) {
      try {
        await this.socket.send(next);
      } catch {} // the socket was closed; what was lost otherwise is asked for again
    }
    this.isSending = false;
  }
}
