/** Errors as they cross the wire: a kind (the name of one of longstep's error classes), a message, and where it happened. */

/** Root of the errors that this package raises; `kind` names the class of `longstep.errors` that it stands for. */
export class LongstepError extends Error {
  readonly kind: string;

  constructor(kind: string, message: string) {
    super(message);
    this.name = kind;
    this.kind = kind;
  }
}

/** A peer sent what the protocol forbids. */
export class ProtocolError extends LongstepError {
  constructor(message: string) {
    super("ProtocolError", message);
  }
}

/** Kind, message and place of whatever was thrown, within the lengths that travel. */
export function describe(error: unknown): [kind: string, message: string, where: string] {
  if (error instanceof LongstepError) return [error.kind, wellFormed(error.message), place(error)];
  if (error instanceof Error)
    return ["LongstepError", wellFormed(`${error.name}: ${error.message}`), place(error)];
  return ["LongstepError", wellFormed(`thrown: ${String(error)}`), ""];
}

/** `Type: message`, as the error of one slot reads. */
export function asText(error: unknown): string {
  if (error instanceof Error) return wellFormed(`${error.name}: ${error.message}`);
  return wellFormed(`Error: ${String(error)}`);
}

/** Text without lone surrogates, cut to what an error may hold. */
function wellFormed(text: string): string {
  return Buffer.from(text.slice(0, 8000), "utf8").toString("utf8");
}

function place(error: Error): string {
  const line = error.stack?.split("\n").find((entry) => entry.trimStart().startsWith("at "));
  const found = line?.match(/at (?:(.*?) \()?.*?([^/\\]+?):(\d+):\d+\)?$/);
  return found ? `${found[2]}:${found[3]} in ${found[1] ?? "<anonymous>"}`.slice(0, 400) : "";
}
