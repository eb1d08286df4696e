// @vitest-environment happy-dom
import { fireEvent, screen, waitFor } from "@testing-library/react";
import { describe, expect, it } from "vitest";
import type { GoodputTotals, WaitingRun } from "./api/schema";
import { line } from "./samples";
import { openPage, rowsOf } from "./testbed";

const waiting = (fields: Partial<WaitingRun>): WaitingRun => ({
  run: "gpt", uid: "uid-gpt", state: "queued", user: "mia", partition: "a100", gpus: 8,
  job_id: "88", since: "2026-01-01T10:00:00Z", reason: "Priority", starts_at: null,
  action: "wait", ...fields,
});

describe("the queue", () => {
  it("has why each run waits, what helps and when it starts", async () => {
    const soon = new Date(Date.now() + 2 * 3_600_000 + 60_000).toISOString();
    openPage("/queue", { "GET /queue": [waiting({ starts_at: soon }),
      waiting({ run: "vit", uid: "uid-vit", state: "waiting", partition: null, job_id: null,
        reason: null, action: "Relaunch tries it now" })] });
    await screen.findByText("vit");
    const [one, other] = rowsOf("Queue");
    expect(one).toMatch(/^gptqueued by mia · job 88PriorityWhat helps: wait\.8a100.*in 2 h$/);
    expect(other).toMatch(/^vitwaiting by miano reason is known.*default.*no forecast$/);
  });

  it("says that nothing waits", async () => {
    openPage("/queue", { "GET /queue": [] });
    await screen.findByText("No run waits for GPUs");
  });
});

const totals = (gpu_hours: number): GoodputTotals => ({
  runs: 2, total_s: 100, queued_s: 0, starting_s: 0, loading_s: 0, training_s: 90, lost_s: 10,
  blocked_s: 0, hung_s: 0, flushing_s: 0, stopped_s: 0, ettr: 0.9, steps_lost: 1, gpu_hours,
  preemption_gpu_hours: 0.5, money: [],
});

describe("goodput and cost", () => {
  it("are of the chosen runs, and by user or another group", async () => {
    const server = openPage("/goodput?user=mia&since=week", {
      "GET /runs": { items: [line("gpt")], next: null, unreadable: [] },
      "GET /goodput": totals(7),
      "GET /goodput/groups": ({ query: { by } }) =>
        [{ name: by === "user" ? "mia" : null, totals: totals(7) }] });
    await screen.findByText("By user");
    await waitFor(() => expect(rowsOf("Goodput by user")[0]).toMatch(/^mia290\.0 %7\.0/));
    for (const request of ["GET /runs", "GET /goodput", "GET /goodput/groups"] as const) {
      expect(server.requests(request).at(-1)?.query).toMatchObject(
        { user: "mia", created_within: "604800" });
    }
    const group = (by: string) =>
      fireEvent.change(screen.getByLabelText("Group by"), { target: { value: by } });
    group("tag");
    await waitFor(() => expect(rowsOf("Goodput by tag")[0]).toMatch(/^no tag290/));
    expect(screen.getByText(/several tags counts in the group of each/)).toBeTruthy();
    group("account");
    await waitFor(() => expect(rowsOf("Goodput by account")[0]).toMatch(/^default290/));
    group("partition");
    await waitFor(() => expect(rowsOf("Goodput by partition")[0]).toMatch(/^default290/));
    fireEvent.change(screen.getByLabelText("Partition"), { target: { value: "a100" } });
    await waitFor(() => expect(server.requests("GET /goodput").at(-1)?.query).toMatchObject(
      { user: "mia", partition: "a100" }));
    fireEvent.change(screen.getByLabelText("Account"), { target: { value: "vision" } });
    fireEvent.change(screen.getByLabelText("Tag"), { target: { value: "night" } });
    for (const request of ["GET /runs", "GET /goodput", "GET /goodput/groups"] as const) {
      await waitFor(() => expect(server.requests(request).at(-1)?.query).toMatchObject(
        { user: "mia", partition: "a100", account: "vision", tag: "night" }));
    }
  });
});
