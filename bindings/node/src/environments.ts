/** The service `longstep.env`: environments written in JavaScript. PROTOCOL.md, section 9. */

import { asText, LongstepError } from "./errors.js";
import { REPLY_LIMITS } from "./limits.js";
import { Server, type Answer, type ServerOptions, type Service } from "./server.js";
import type { Value } from "./values.js";
import { encode } from "./wire.js";

export interface Start {
  /** The same seed and actions must give the same episode; null goes on with the environment's own random stream. */
  seed: number | bigint | null;
  options: { [key: string]: Value } | null;
}

/** Facts beside the observation. Known to longstep: `task_description` (at reset), `admissible_actions`, `success`. */
export type Info = { [key: string]: Value };

export interface ResetResult {
  observation: Value;
  info?: Info;
}

export interface StepResult extends ResetResult {
  reward: number;
  /** The task is solved or lost. */
  terminated: boolean;
  /** The episode was cut off before. */
  truncated: boolean;
}

type Awaitable<T> = T | Promise<T>;

/** An environment; its methods may return promises. */
export interface Environment {
  reset(start: Start): Awaitable<ResetResult>;
  /** `action` is text, unless the training side was told otherwise. */
  step(action: Value): Awaitable<StepResult>;
  close?(): Awaitable<void>;
  /** With `restore`: the state, for another environment to stand where this one stands. */
  snapshot?(): Awaitable<unknown>;
  restore?(snapshot: unknown): Awaitable<void>;
}

export interface EnvironmentOptions extends ServerOptions {
  /** What clients ask for, such as `team/Shop-v0`. */
  name: string;
  /** Gives a new environment at each call. */
  make: () => Awaitable<Environment>;
  /** True for environments that wait (for a browser, a network): their commands then run beside each other. */
  blocking?: boolean;
  stepTimeoutS?: number;
  resetTimeoutS?: number;
}

/** Serve environments until `stop`. */
export function serve(options: EnvironmentOptions): Promise<Server> {
  const { name, make, blocking, stepTimeoutS, resetTimeoutS, ...rest } = options;
  return Server.start(new Environments(name, make, blocking ?? false, stepTimeoutS ?? 60, resetTimeoutS ?? 120), rest);
}

const MAX_SLOTS = 1024;
type Row = [observation: Value, reward: number, terminated: boolean, truncated: boolean, info: Info, error: string | null, seconds: number];
type Operation = "reset" | "step" | "replay" | "copy";
type Command = [slot: number, operation: Operation, argument: Value];

class Environments implements Service {
  readonly name = "longstep.env";
  readonly version = 1;
  readonly methods = {
    open: (session: number, value: Value): Answer => this.open(session, value),
    run: (session: number, value: Value): Answer => this.run(session, value),
  };
  private readonly sessions = new Map<number, Slot[]>();

  constructor(
    private readonly environment: string,
    private readonly make: () => Awaitable<Environment>,
    readonly defers: boolean,
    private readonly stepTimeoutS: number,
    private readonly resetTimeoutS: number,
  ) {}

  private async open(session: number, value: Value): Promise<Uint8Array[]> {
    const numSlots = readOrder(value, this.environment);
    if (this.sessions.has(session)) throw new LongstepError("ConfigError", "expected one `open` in a session, got a second one");
    const slots = Array.from({ length: numSlots }, () => new Slot(this.make));
    this.sessions.set(session, slots);
    const first = await (slots[0] as Slot).build();
    return encode({
      environment: this.environment,
      kind: "raw",
      blocking: this.defers,
      has_board: false,
      can_copy: canCopy(first),
      suspects: [],
      step_timeout_s: this.stepTimeoutS,
      reset_timeout_s: this.resetTimeoutS,
    });
  }

  private async run(session: number, value: Value): Promise<Uint8Array[]> {
    const slots = this.sessions.get(session);
    if (slots === undefined) throw new LongstepError("ConfigError", "expected `open` before `run` in a session");
    const commands = readCommands(value, slots.length);
    const rows: Row[] = [];
    if (this.defers) {
      rows.push(...(await Promise.all(commands.map(([slot, ...rest]) => (slots[slot] as Slot).execute(...rest, slots)))));
    } else {
      for (const [slot, ...rest] of commands) rows.push(await (slots[slot] as Slot).execute(...rest, slots));
    }
    try {
      return encode(columns(rows), REPLY_LIMITS);
    } catch {
      return encode(columns(rows.map(sendable)), REPLY_LIMITS);
    }
  }

  async closeSession(session: number): Promise<void> {
    const slots = this.sessions.get(session) ?? [];
    this.sessions.delete(session);
    for (const slot of slots) await slot.discard();
  }
}

function columns(rows: Row[]): Value {
  return Array.from({ length: 7 }, (_, index) => rows.map((row) => row[index] as Value));
}

function failed(error: unknown, seconds: number): Row {
  return [null, 0, false, false, {}, asText(error), seconds];
}

function sendable(row: Row): Row {
  try {
    encode(row, REPLY_LIMITS);
    return row;
  } catch (error) {
    return failed(error, row[6]);
  }
}

function canCopy(env: Environment): boolean {
  return env.snapshot !== undefined && env.restore !== undefined;
}

/** One place for an environment, which is made when first reset, and anew after it failed. */
class Slot {
  private env: Environment | null = null;
  private last: Row | null = null;
  private turn: Promise<unknown> = Promise.resolve();

  constructor(private readonly make: () => Awaitable<Environment>) {}

  async build(): Promise<Environment> {
    this.env ??= await this.make();
    return this.env;
  }

  async discard(): Promise<void> {
    const env = this.env;
    this.env = this.last = null;
    try {
      await env?.close?.();
    } catch {} // a broken one may fail at that too, and there is nobody left to tell
  }

  /** The row of a command, after those before it in this slot. */
  execute(operation: Operation, argument: Value, slots: Slot[]): Promise<Row> {
    const row = this.turn.then(() => this.attempt(operation, argument, slots));
    this.turn = row;
    return row;
  }

  private async attempt(operation: Operation, argument: Value, slots: Slot[]): Promise<Row> {
    const start = performance.now();
    const seconds = (): number => (performance.now() - start) / 1000;
    try {
      const row = await this.perform(operation, argument, slots);
      return [...row.slice(0, 6), seconds()] as Row;
    } catch (error) {
      await this.discard();
      return failed(error, seconds());
    }
  }

  private perform(operation: Operation, argument: Value, slots: Slot[]): Promise<Row> {
    if (operation === "reset") return this.reset(argument);
    if (operation === "step") return this.step(argument);
    if (operation === "copy") return this.copy(slots[argument as number] as Slot);
    return this.replay(argument);
  }

  private async reset(argument: Value): Promise<Row> {
    const [seed, options] = Array.isArray(argument) && argument.length === 2 ? argument : [undefined, undefined];
    const isSeed = seed === null || typeof seed === "bigint" || Number.isInteger(seed);
    const isOptions = options === null || (typeof options === "object" && Object.getPrototypeOf(options) === Object.prototype);
    if (!isSeed || !isOptions) throw new LongstepError("DataError", "expected [seed, options] as argument of `reset`");
    const env = await this.build();
    const { observation, info } = await env.reset({ seed, options } as Start);
    return (this.last = [observation, 0, false, false, info ?? {}, null, 0]);
  }

  private async step(action: Value): Promise<Row> {
    if (this.env === null) throw new LongstepError("EnvError", "the environment of this slot was lost; reset it");
    const { observation, reward, terminated, truncated, info } = await this.env.step(action);
    if (typeof reward !== "number" || typeof terminated !== "boolean" || typeof truncated !== "boolean")
      throw new LongstepError("EnvError", "expected a number as `reward`, booleans as `terminated` and `truncated`");
    return (this.last = [observation, reward, terminated, truncated, info ?? {}, null, 0]);
  }

  private async replay(argument: Value): Promise<Row> {
    const [start, actions] = Array.isArray(argument) && argument.length === 2 ? argument : [null, null];
    if (!Array.isArray(actions)) throw new LongstepError("DataError", "expected [start, actions] as argument of `replay`");
    const told: Value[] = start === null ? [] : [(await this.reset(start as Value))[0]];
    for (const action of actions) told.push((await this.step(action))[0]);
    return [told, 0, false, false, {}, null, 0];
  }

  private async copy(source: Slot): Promise<Row> {
    if (source.env === null || source.last === null || !canCopy(source.env))
      throw new LongstepError("EnvError", "expected an environment with a snapshot in the slot to copy");
    const env = await this.build();
    await env.restore?.(await source.env.snapshot?.());
    return (this.last = [...source.last]);
  }
}

function readOrder(value: Value, environment: string): number {
  const order = (value ?? {}) as { environment?: Value; num_slots?: Value; owner?: Value };
  const { environment: name, num_slots: numSlots, owner } = order;
  const isOwner = (typeof owner === "number" || typeof owner === "bigint") && owner >= 0;
  if (name === undefined || !isOwner || !Number.isInteger(numSlots) || (numSlots as number) < 1 || (numSlots as number) > MAX_SLOTS)
    throw new LongstepError("DataError", `expected \`environment\`, \`num_slots\` from 1 to ${MAX_SLOTS} and \`owner\` at \`open\``);
  if (name !== null && name !== environment)
    throw new LongstepError("RegistryError", `expected an environment that this server has, got \`${String(name)}\`; known: \`${environment}\``);
  return numSlots as number;
}

function readCommands(value: Value, numSlots: number): Command[] {
  if (!Array.isArray(value) || value.length !== 3 || !value.every(Array.isArray))
    throw new LongstepError("DataError", "expected [slots, operations, arguments] at `run`");
  const [slots, operations, args] = value as [Value[], Value[], Value[]];
  if (slots.length === 0 || slots.length !== operations.length || slots.length !== args.length)
    throw new LongstepError("DataError", "expected three columns of one length at `run`");
  const isSlot = (slot: Value | undefined): boolean => Number.isInteger(slot) && (slot as number) >= 0 && (slot as number) < numSlots;
  return slots.map((slot, index) => {
    const [operation, argument] = [operations[index], args[index]];
    if (!["reset", "step", "replay", "copy"].includes(operation as string))
      throw new LongstepError("DataError", "expected operations among copy, replay, reset, step at `run`");
    if (!isSlot(slot) || (operation === "copy" && !isSlot(argument)))
      throw new LongstepError("DataError", `expected slots from 0 to ${numSlots - 1} at \`run\``);
    return [slot, operation, argument] as Command;
  });
}
