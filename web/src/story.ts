// Descriptions of operators' requests and of the ends of attempts and launches. Pure functions.
import type { Attempt, Crash, Launch, Noticed, OperatorRequest, Run } from "./api/types";
import { count, runOf } from "./format";
import { isLive, plain, type Tone } from "./states";

// By action: the state while the request is pending, and that of an attempt that ended for it.
const ACTIONS: Record<string, readonly [pending: string, ended: string]> = {
  pause: ["pausing", "paused"],
  stop: ["stopping", "stopped"],
  cancel: ["cancelling", "cancelled"],
  relaunch: ["relaunching", "relaunched"],
};

type Asked = Pick<Run, "state" | "attempts" | "requests">;

export const gpus = (size: number): string => `${size} GPU${size === 1 ? "" : "s"}`;

/** The last request that was made during an attempt. */
function requestOf(requests: OperatorRequest[] | undefined, attempt: number) {
  return requests?.findLast((one) => one.after_attempt === attempt && one.action in ACTIONS);
}

/** The state of a run. A pending request takes precedence. */
export function stateOf({ state, attempts, requests }: Asked): string {
  const last = attempts.at(-1);
  if (!last || last.ended_at !== null || (state !== "running" && state !== "queued")) return state;
  const request = requestOf(requests, last.number);
  return (request && ACTIONS[request.action]?.[0]) ?? state;
}

/** How an attempt ended. An operator's request takes precedence over the scheduler's state. */
export function endOf(attempt: Attempt, requests: OperatorRequest[] | undefined): string {
  const request = attempt.cause === "operator" ? requestOf(requests, attempt.number) : undefined;
  return (request && ACTIONS[request.action]?.[1]) ?? attempt.state;
}

/** Why an attempt ended, or why it was started. */
export function reasonOf(attempt: Attempt, requests: OperatorRequest[] | undefined): string {
  if (!attempt.cause) return attempt.reason === "first" ? "first attempt" : inWords(attempt);
  const request = attempt.cause === "operator" ? requestOf(requests, attempt.number) : undefined;
  return request ? `${endOf(attempt, requests)} by ${request.by}` : plain(attempt.cause);
}

/** The supervisor's reason, which begins with the name of the last attempt's cause. */
const inWords = ({ reason }: Attempt): string =>
  (reason ?? "").replace(/^after \w+/, (words) => plain(words));

/** Why an attempt was started at its size, in the supervisor's words; "" for the first one. */
export function startOf(attempt: Attempt): string {
  const reason = inWords(attempt);
  if (!reason || reason === "first") return "";
  return reason.startsWith("after ") ? `started ${reason}` : `started by ${reason}`;
}

/** Who failed first in a launch: its rank, host, signal or exit status; "" if unknown. */
export function crashWords(crash: Crash | undefined): string {
  if (!crash || crash.rank === null) return "";
  const { rank, host, signal, exit_code: status } = crash;
  const how = signal ? `killed by ${signal}` : status === null ? "failed" : `exit status ${status}`;
  return `rank ${rank}${host ? ` on ${host}` : ""}: ${how}`;
}

/** Describes the launches that were followed by another one in the same attempt. */
export function restartsOf({ number, launches }: Attempt, crashes: Crash[] = []): string[] {
  return launches.slice(1).flatMap((next, index) => {
    const before = launches[index];
    if (!before?.ending || before.ending === "completed") return [];
    const who = crashWords(crashes.find((one) =>
      one.attempt === number && one.launch === before.number));
    const at = before.last_step === null ? "" : ` at step ${count(before.last_step)}`;
    const from = next.first_step === null ? "" : ` from step ${count(next.first_step - 1)}`;
    const named = who ? ` (${who})` : "";
    return [`launch ${before.number} ${before.ending}${at}${named}, restarted in place${from}`];
  });
}

export interface Mark {
  x: number;
  word: string;
  tone: Tone;
}

const toneOf = (attempt: Attempt): Tone =>
  attempt.cause === "operator" || !attempt.cause ? "note"
    : attempt.state === "preempted" || attempt.state === "timed_out" ? "warn" : "bad";

const restartMark = (launch: Launch): Mark[] =>
  launch.first_step === null ? []
    : [{ x: launch.first_step - 1, word: "restart in place", tone: "warn" }];

/** The steps at which a run continued after a relaunch, a restart or a resize. */
export function marksOf({ attempts, requests }: Asked): Mark[] {
  return attempts.flatMap((attempt, index): Mark[] => {
    const before = attempts[index - 1];
    const restarts = attempt.launches.slice(1).flatMap(restartMark);
    if (!before) return restarts;
    const ended = before.cause === "operator" ? endOf(before, requests)
      : before.cause ? plain(before.cause) : "relaunch";
    const resized = before.gpus !== attempt.gpus
      ? ` → ${gpus(attempt.gpus)}` : "";
    const x = attempt.resumed_step ?? attempt.first_step ?? 0;
    return [{ x, word: `${ended}${resized}`, tone: toneOf(before) }, ...restarts];
  });
}

/** The step at which a run left the one that it was forked from. */
export function forkMark({ forked_from: from }: Pick<Run, "forked_from">): Mark[] {
  const step = /:step-0*(\d+)\.a\d+\.l\d+$/.exec(from ?? "")?.[1];
  return step === undefined ? []
    : [{ x: Number(step), word: `fork of ${runOf(from ?? "")}`, tone: "note" }];
}

/** The notices, without restarts in place, which the table of attempts shows. */
export const noticesOf = ({ noticed }: Pick<Run, "noticed">): Noticed[] =>
  (noticed ?? []).filter((one) => one.kind !== "launch_started");

/** Equal notices of one attempt as one, the newest, with their number. */
export function grouped<T extends Pick<Noticed, "attempt" | "text" | "at">>(
  notices: T[],
): (T & { times: number })[] {
  const found = new Map<string, T & { times: number }>();
  for (const one of notices.toSorted((a, b) => b.at - a.at)) {
    const key = `${one.attempt}|${one.text.replace(/\d+(\.\d+)?/g, "#")}`;
    const newest = found.get(key);
    if (newest) newest.times += 1;
    else found.set(key, { ...one, times: 1 });
  }
  return [...found.values()];
}

/** Whether a notice is about the current attempt. */
export function isCurrent({ attempt }: Pick<Noticed, "attempt">, run: Asked): boolean {
  return isLive(run.state) && (attempt === null || attempt === run.attempts.at(-1)?.number);
}

/** The warning of a live run without a supervisor; null for other runs. */
export function unsupervised({ supervision }: Pick<Run, "supervision">): string | null {
  if (!supervision || supervision.is_alive !== false) return null;
  const { host, pid, is_remote: isRemote } = supervision;
  const last = host ? ` The last one ran on ${host} (pid ${pid ?? "unknown"}).` : "";
  return isRemote
    ? `This server sees no supervisor for this run.${last} Check that host, then use Relaunch.`
    : `No supervisor is running, so this run will not continue by itself.${last} ` +
      "Relaunch starts a new supervisor.";
}
