/** Heads: the first frame of every message. PROTOCOL.md, section 3. */

import { LongstepError, ProtocolError } from "./errors.js";
import { LIMITS } from "./limits.js";
import type { Value } from "./values.js";
import { pack, unpack } from "./wire.js";

export const PROTOCOL_VERSION = 1;
export const MAX_OPEN = 4096;

export enum Kind {
  HELLO = 1,
  WELCOME = 2,
  REFUSED = 3,
  REQUEST = 4,
  REPLY = 5,
  ERROR = 6,
  PING = 7,
  PONG = 8,
  CANCEL = 9,
  LOST = 10,
  BYE = 11,
}

export interface Head {
  kind: Kind;
  token: Uint8Array;
  /** Checked against the kind. */
  fields: any[];
}

/** A peer speaks another version of the protocol; `token` is what an answer has to carry. */
export class WrongVersionError extends ProtocolError {
  constructor(
    version: unknown,
    readonly token: Uint8Array,
  ) {
    super(`expected protocol version 1, got ${String(version).slice(0, 40)}; install the same version of longstep on both sides`);
  }
}

export function packHead(kind: Kind, token: Uint8Array, ...fields: Value[]): Uint8Array {
  return pack([PROTOCOL_VERSION, kind, token, ...fields]);
}

export function unpackHead(frame: Uint8Array): Head {
  if (frame.byteLength > LIMITS.max_head_bytes) throw new ProtocolError("expected a shorter head");
  const parts = unpack(frame, 4);
  if (!Array.isArray(parts) || parts.length < 3) throw new ProtocolError("expected a head [version, kind, token, ...]");
  const [version, kind, token, ...fields] = parts;
  if (!(token instanceof Uint8Array) || token.byteLength !== 16) throw new ProtocolError("expected a token of 16 bytes");
  if (version !== PROTOCOL_VERSION) throw new WrongVersionError(version, token);
  const checks = FIELDS[kind as Kind];
  if (typeof kind !== "number" || checks === undefined) throw new ProtocolError("expected a kind from 1 to 11");
  if (fields.length !== checks.length || !checks.every((check, index) => check(fields[index])))
    throw new ProtocolError(`expected other fields in a head of kind ${kind}`);
  return { kind, token, fields };
}

type Check = (field: unknown) => boolean;
const isCount: Check = (field) => typeof field === "number" && Number.isInteger(field) && field >= 0 && field <= 2 ** 53;
const isCounts: Check = (field) => Array.isArray(field) && field.length <= MAX_OPEN && field.every(isCount);
const isText: Check = (field) => typeof field === "string" && field.length <= 10_000;
const isTerms: Check = (field) =>
  field !== null && typeof field === "object" && Object.getPrototypeOf(field) === Object.prototype;

const FIELDS: Readonly<Record<Kind, readonly Check[]>> = {
  [Kind.HELLO]: [isTerms],
  [Kind.WELCOME]: [isTerms],
  [Kind.REFUSED]: [isText, isText],
  [Kind.REQUEST]: [isCount, isCount, isCounts, (field) => isCount(field) && (field as number) <= 2 ** 40, isText],
  [Kind.REPLY]: [isCount],
  [Kind.ERROR]: [isCount, isText, isText, isText],
  [Kind.PING]: [isCount, isCount, isCounts],
  [Kind.PONG]: [isCount, isCounts],
  [Kind.CANCEL]: [isCount],
  [Kind.LOST]: [isText],
  [Kind.BYE]: [isText],
};

/** The key under which a token is kept. */
export function tokenKey(token: Uint8Array): string {
  return Buffer.from(token).toString("latin1");
}

/** Refuse an address of another kind, or one off this machine without CURVE keys. */
export function checkAddress(address: string, hasKeys: boolean): void {
  if (/^ipc:\/\/.+/.test(address) || /^tcp:\/\/(127(\.\d+){3}|localhost|\[::1\]):/.test(address)) return;
  if (!/^tcp:\/\/.+:/.test(address))
    throw new LongstepError("ConfigError", `expected ipc://path or tcp://host:port, got ${address}`);
  if (!hasKeys)
    throw new LongstepError("ConfigError", `expected CURVE keys for ${address}, which other machines can reach`);
}
