import { describe, expect, it } from "vitest";
import type { OperatorRequest, Run } from "./api/types";
import { attempt, launch } from "./samples";
import {
  crashWords, endOf, grouped, isCurrent, marksOf, noticesOf, reasonOf, restartsOf, stateOf,
  unsupervised,
} from "./story";

const asked = (action: string, after: number): OperatorRequest =>
  ({ number: 1, action, by: "mia", at: 0, gpus: null, after_attempt: after, state: "done",
    detail: "" });

const run = (fields: Partial<Run>) => ({ state: "running", attempts: [], ...fields }) as unknown as
  Run;

describe("a request of an operator", () => {
  const paused = attempt({ state: "cancelled", cause: "operator", ended_at: "x" });

  it("is shown while it is pending", () => {
    const live = run({ attempts: [attempt({})], requests: [asked("pause", 1)] });
    expect(stateOf(live)).toBe("pausing");
    expect(stateOf({ ...live, requests: [asked("relaunch", 0)] })).toBe("running");
    expect(stateOf({ ...live, state: "paused", attempts: [paused] })).toBe("paused");
  });

  it("determines how its attempt ended, and its mark is not an error", () => {
    expect(endOf(paused, [asked("pause", 1)])).toBe("paused");
    expect(reasonOf(paused, [asked("pause", 1)])).toBe("paused by mia");
    expect(endOf(paused, [])).toBe("cancelled");
    const attempts = [paused, attempt({ number: 2, gpus: 1, resumed_step: 7 })];
    expect(marksOf(run({ attempts, requests: [asked("relaunch", 1)] }))).toEqual(
      [{ x: 7, word: "relaunched → 1 GPU", tone: "note" }]);
  });
});

describe("a launch that failed inside an attempt", () => {
  const one = attempt({ launches: [
    launch({ first_step: 1, last_step: 186, ending: "crashed" }),
    launch({ number: 2, first_step: 151 }),
  ] });

  it("is described with the step of the resume, and marked on the curves", () => {
    expect(restartsOf(one)).toEqual(
      ["launch 1 crashed at step 186, restarted in place from step 150"]);
    expect(marksOf(run({ attempts: [one] }))).toEqual(
      [{ x: 150, word: "restart in place", tone: "warn" }]);
  });

  it("names the rank that failed first", () => {
    const crash = { attempt: 1, launch: 1, rank: 1, host: "gpu-3", signal: "signal 9 (SIGKILL)",
      exit_code: null };
    expect(restartsOf(one, [crash])[0]).toBe("launch 1 crashed at step 186 " +
      "(rank 1 on gpu-3: killed by signal 9 (SIGKILL)), restarted in place from step 150");
    expect(crashWords({ ...crash, signal: null, exit_code: 3 })).toBe(
      "rank 1 on gpu-3: exit status 3");
  });

  it("is shown with the attempts and not as a notice", () => {
    const notice = (kind: string) => ({ kind, attempt: 1, at: 0, text: kind, dumps: [] });
    const noticed = [notice("straggler"), notice("launch_started")];
    expect(noticesOf({ noticed }).map((one) => one.kind)).toEqual(["straggler"]);
  });
});

it("groups equal notices of an attempt, with the newest text", () => {
  const hung = (attempt: number, at: number, text: string) => ({ attempt, at, text });
  expect(grouped([hung(1, 1, "step 7 hung"), hung(1, 2, "step 9 hung"), hung(2, 3, "step 9 hung")]))
    .toEqual([{ ...hung(2, 3, "step 9 hung"), times: 1 },
      { ...hung(1, 2, "step 9 hung"), times: 2 }]);
});

describe("current notices", () => {
  it("are those of the newest attempt, and none after the run's end", () => {
    const live = run({ attempts: [attempt({}), attempt({ number: 2 })] });
    expect(isCurrent({ attempt: 2 }, live)).toBe(true);
    expect(isCurrent({ attempt: 1 }, live)).toBe(false);
    expect(isCurrent({ attempt: 2 }, { ...live, state: "completed" })).toBe(false);
  });

  it("include a missing supervisor, unless one may be starting", () => {
    const gone = { is_alive: false, is_remote: false, host: "login", pid: 7 };
    expect(unsupervised({ supervision: gone })).toContain("No supervisor is running");
    const remote = { ...gone, is_remote: true };
    expect(unsupervised({ supervision: remote })).toContain("Check that host");
    expect(unsupervised({ supervision: { ...gone, is_alive: null } })).toBeNull();
    expect(unsupervised({ supervision: null })).toBeNull();
  });
});
