// @vitest-environment happy-dom
import { fireEvent, screen, waitFor, within } from "@testing-library/react";
import { describe, expect, it } from "vitest";
import type { LaunchDifference, RunErrors, StackDump } from "./api/schema";
import { attempt, errors, failure, run } from "./samples";
import { openPage, rowsOf } from "./testbed";

const KILLED = failure({
  text: "rank 7 on node-b: killed by signal 9 (SIGKILL)", kind: "killed", ranks: "7",
  hosts: ["node-b"], signal: "signal 9 (SIGKILL)", exit_code: null, is_first: true, launch: 2,
  file: "attempts/0001/logs/node-0001/l02/rank-00007.stderr.log",
});
const PEERS = failure({
  text: "ranks 0-6 on 2 hosts: ConnectionError: closed, after rank 7 was killed", ranks: "0-6",
  ranks_count: 7, is_secondary: true, launch: 2, at: "2026-01-01T10:20:00Z", clock: "node-a",
  traceback: "Traceback\nConnectionError: closed", until: "2026-01-01T10:20:01.500Z",
});
const EARLIER = failure({ text: "rank 1: ValueError: no", is_first: true, traceback: "earlier" });
const ENDED = failure({ source: "journal", kind: "attempt_ended", text: "the attempt ended as "
  + "failed", launch: null, ranks: "", ranks_count: 0, exit_code: null });
const DUMP: StackDump = {
  attempt: 1, launch: 2, number: 3, at: null, state: "confirmed", finding: "missing: rank 3",
  groups: [
    { ranks: "0-2", ranks_count: 3, frames: ["all_reduce (c10d.py:9)", "main (t.py:4)"],
      waits: true, is_odd: false, problem: null },
    { ranks: "3", ranks_count: 1, frames: ["read (data.py:7)"], waits: false, is_odd: true,
      problem: null },
    { ranks: "4", ranks_count: 1, frames: [], waits: false, is_odd: true, problem: "it had ended" },
    { ranks: "5", ranks_count: 1, frames: [], waits: false, is_odd: true, problem: "no answer" },
  ],
  flights: [{ group: "default_pg (0)", ranks: "0-2", ranks_count: 3, call: "all_reduce 41",
    state: "started", place: "t.py:4", is_odd: false }],
  flight_finding: "rank 3 is missing in all_reduce 41", files: ["attempts/0001/dumps/node-0000-03"],
  unread: 2,
};
const DIFFERENCE: LaunchDifference = {
  failed: { attempt: 1, number: 2 }, worked: { attempt: 1, number: 1 },
  reached: "it finished no step",
  facts: [{ name: "hosts", before: "node-a", now: "node-b" },
    { name: "environment.DEBUG", before: null, now: "1" }],
  left_out: 4,
};
const ALL: RunErrors = errors({
  attempt: 1, first: KILLED, entries: [EARLIER, KILLED, PEERS, ENDED], left_out: 3, unread: 5,
  attempts: [{ number: 1, state: "failed", cause: null, launches: [1, 2] },
    { number: 3, state: "hung", cause: "hang", launches: [1] }],
  order_note: "Times are by the clocks of node-a, node-b, which may differ.",
  stacks: [DUMP], difference: DIFFERENCE,
});

const opened = (found: RunErrors) =>
  openPage("/runs/gpt/errors", { "GET /runs/gpt/errors": found });

describe("the errors of a run", () => {
  it("begin with the first cause of the last failure, with its traceback open", async () => {
    const first = failure({ ...KILLED, traceback: "Traceback\nValueError: bad" });
    opened({ ...ALL, first, entries: [first, PEERS] });
    await screen.findByText("Why it failed");
    const said = screen.getByText("Why it failed").parentElement as HTMLElement;
    expect(said.textContent).toContain(KILLED.text);
    expect(said.textContent).toContain("Rank7Hostnode-bSignalsignal 9 (SIGKILL)");
    expect(screen.getByRole("region", { name: "Traceback of the first cause" }).textContent)
      .toBe("Traceback\nValueError: bad");
    const log = within(said).getByText("Log").getAttribute("href");
    expect(log).toContain("/runs/gpt/logs?attempt=");
    expect(log).toContain("rank-00007.stderr.log");
  });

  it("are listed by launch, each first cause marked, with what was left out", async () => {
    opened(ALL);
    await screen.findByText("Errors in order");
    const lists = [...document.querySelectorAll("ol.errors")];
    expect(lists.map((one) => one.previousElementSibling?.textContent)).toEqual(
      ["Launch 1 · –", expect.stringMatching(/^Launch 2 · .*ago$/), "Attempt 1 · –"]);
    expect(screen.getAllByText("first cause")).toHaveLength(2);
    const [, second] = lists;
    expect(second?.querySelectorAll("li")).toHaveLength(2);
    expect(second?.textContent).toContain(", for 1.5 s by the clock of node-a");
    expect(second?.textContent).toContain("time unknown");
    expect(screen.getByText("3 more errors are not listed.")).toBeTruthy();
    expect(screen.getByText(/files of 5 more processes/)).toBeTruthy();
    expect(screen.getByText(/which may differ/)).toBeTruthy();
  });

  it("have the stacks by equal stack, and the odd ones are open", async () => {
    opened(ALL);
    const groups = await waitFor(() => {
      const found = [...document.querySelectorAll("details")]
        .filter((one) => / at /.test(one.querySelector("summary")?.textContent ?? ""));
      expect(found).toHaveLength(4);
      return found;
    });
    expect(groups.map((one) => one.querySelector("summary")?.textContent)).toEqual([
      "3 ranks: 0-2 waiting for others at all_reduce (c10d.py:9)",
      "elsewhere rank 3 at read (data.py:7)",
      "elsewhere rank 4 at it had ended",
      "elsewhere rank 5 at no answer",
    ]);
    expect(groups.map((one) => one.open)).toEqual([false, true, true, true]);
    expect(screen.getByText("Launch 2 · the launch hung")).toBeTruthy();
    expect(rowsOf("Collectives of dump 3")).toEqual(
      ["3 ranks: 0-2all_reduce 41 (started)default_pg (0)t.py:4"]);
    expect(screen.getByText(/2 stacks were not read/)).toBeTruthy();
  });

  it("say what changed since the last launch that worked", async () => {
    opened(ALL);
    await screen.findByText(/The last launch that worked before attempt 1, launch 2 is/);
    expect(rowsOf("What changed")).toEqual(["hostsnode-anode-b", "environment.DEBUG–1"]);
    expect(screen.getByText("4 more facts differ.")).toBeTruthy();
  });

  it("say that no launch worked, and that nothing differs", async () => {
    const server = opened({ ...ALL, difference: { ...DIFFERENCE, worked: null, facts: [] } });
    await screen.findByText(/No launch before attempt 1, launch 2 reached a new step/);
    expect(screen.queryByText("Nothing that is recorded differs.")).toBeNull();
    server.give({ "GET /runs/gpt/errors": { ...ALL, attempt: 3,
      difference: { ...DIFFERENCE, facts: [], left_out: 0 } } });
    fireEvent.change(screen.getByLabelText("Attempt"), { target: { value: "3" } });
    await screen.findByText("Nothing that is recorded differs.");
    expect(server.requests("GET /runs/gpt/errors").at(-1)?.query).toEqual({ attempt: "3" });
  });

  it("name the attempt that is shown, and lead from one without errors to the others", async () => {
    const server = opened({ ...ALL, attempt: 3 });
    const chosen = await screen.findByLabelText<HTMLSelectElement>("Attempt");
    expect(chosen.selectedOptions[0]?.textContent).toBe("3: hung, launches that failed: 1");
    expect(screen.getByText("the newest attempt with errors")).toBeTruthy();
    server.give({ "GET /runs/gpt/errors": errors({ attempt: 2, attempts: ALL.attempts }) });
    fireEvent.change(chosen, { target: { value: "1" } });
    await screen.findByText("Nothing is recorded of attempt 2 that failed.");
    const other = screen.getByLabelText<HTMLSelectElement>("Attempt");
    expect(other.selectedOptions[0]?.textContent).toBe("2: nothing crashed or hung");
    expect(screen.queryByText("the newest attempt with errors")).toBeNull();
  });

  it("are none for a run that has not failed", async () => {
    opened(errors({}));
    await screen.findByText("No errors");
  });
});

describe("the overview of a run", () => {
  it("says why it failed, with a link to all errors", async () => {
    openPage("/runs/gpt", {
      "GET /runs/gpt": run({ state: "failed", attempts: [attempt({ state: "failed" })] }),
      "GET /runs/gpt/errors": ALL,
    });
    const said = await screen.findByText(/Why it failed:/);
    expect(said.parentElement?.textContent).toContain(KILLED.text);
    expect(screen.getByText("All errors").getAttribute("href")).toBe("/runs/gpt/errors");
  });

  it("names the last failure of a run that trains again", async () => {
    openPage("/runs/gpt", {
      "GET /runs/gpt": run({ crashes: [{ attempt: 1, launch: 1, rank: 7, host: null,
        signal: "signal 9 (SIGKILL)", exit_code: null }] }),
      "GET /runs/gpt/errors": ALL,
    });
    const said = await screen.findByText("The last failure:");
    expect(said.parentElement?.textContent).toContain(KILLED.text);
  });

  it("does not ask for the errors of a run without failures", async () => {
    const server = openPage("/runs/gpt", {});
    await screen.findByText("Where the time went");
    expect(server.requests("GET /runs/gpt/errors")).toHaveLength(0);
  });
});
