/** A server of one service: the hub in a thread of its own, the methods in this one. */

import { Worker } from "node:worker_threads";
import { describe, LongstepError } from "./errors.js";
import type { FromHub, Terms, ToHub } from "./hub.js";
import { decode } from "./wire.js";
import type { Value } from "./values.js";

/** What a service gives for a request: the frames of an answer, at once or later. */
export type Answer = Uint8Array[] | Promise<Uint8Array[]>;

export interface Service {
  readonly name: string;
  readonly version: number;
  /** True when the next request of a session may start before this one is answered. */
  readonly defers: boolean;
  readonly methods: Readonly<Record<string, (session: number, value: Value) => Answer>>;
  /** Release what belongs to a session. */
  closeSession(session: number): void | Promise<void>;
}

export type ServerOptions = Partial<Omit<Terms, "service" | "version" | "methods">>;

export class Server {
  /** Where clients connect. */
  address = "";
  /** Settles once the server has ended, by `stop`, by its parent's death, or by an error. */
  readonly closed: Promise<void>;
  private readonly worker: Worker;
  private readonly running = new Map<number, Promise<void>>();
  private readonly sessions = new Set<number>();

  private constructor(
    private readonly service: Service,
    terms: Terms,
    bound: (error: Error | null) => void,
  ) {
    this.worker = new Worker(new URL("./hubThread.js", import.meta.url), { workerData: terms });
    this.closed = new Promise((resolve, reject) => {
      this.worker.on("error", (error) => {
        bound(error);
        reject(error);
      });
      this.worker.on("exit", () => void this.closeSessions().then(resolve, reject));
    });
    this.closed.catch(() => {}); // told to whoever waits for it
    this.worker.on("message", (message: FromHub) => {
      if (message.type === "bound") {
        this.address = message.address;
        bound(null);
      } else if (message.type === "failed") {
        bound(new LongstepError(message.kind, message.message));
      } else this.obey(message);
    });
  }

  /** Serve at an address, in the background. */
  static async start(service: Service, options: ServerOptions = {}): Promise<Server> {
    const terms: Terms = {
      address: null,
      numCredits: 64,
      heartbeatS: 1,
      lostAfterS: 10,
      maxSessions: 256,
      parentPid: null,
      keys: null,
      ...options,
      service: service.name,
      version: service.version,
      methods: Object.keys(service.methods),
    };
    let server: Server | null = null;
    await new Promise<void>((resolve, reject) => {
      server = new Server(service, terms, (error) => (error === null ? resolve() : reject(error)));
    });
    return server as unknown as Server;
  }

  /** Say goodbye to the clients, close what belongs to them, release the address. */
  async stop(): Promise<void> {
    this.tell({ type: "stop" });
    await this.closed;
  }

  private tell(message: ToHub): void {
    this.worker.postMessage(message);
  }

  private obey(message: FromHub): void {
    if (message.type === "call") {
      this.sessions.add(message.session);
      const done = this.execute(message.id, message.session, message.method, message.frames);
      const before = this.running.get(message.session);
      this.running.set(message.session, Promise.all([before, done]).then(() => {}));
      if (this.service.defers) this.tell({ type: "returned", id: message.id });
    } else if (message.type === "close") {
      void this.closeSession(message.session);
    }
  }

  private async execute(id: number, session: number, method: string, frames: Uint8Array[]): Promise<void> {
    try {
      const run = this.service.methods[method] as Service["methods"][string];
      this.tell({ type: "answer", id, frames: await run(session, decode(frames)) });
    } catch (error) {
      this.tell({ type: "answer", id, error: describe(error) });
    }
  }

  private async closeSession(session: number): Promise<void> {
    const running = this.running.get(session);
    this.running.delete(session);
    if (!this.sessions.delete(session)) return;
    await running;
    await this.service.closeSession(session);
  }

  private async closeSessions(): Promise<void> {
    await Promise.all([...this.sessions].map((session) => this.closeSession(session)));
  }
}
