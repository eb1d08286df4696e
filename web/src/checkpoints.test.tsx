// @vitest-environment happy-dom
import { fireEvent, screen, waitFor } from "@testing-library/react";
import { describe, expect, it } from "vitest";
import type { Graph, Node } from "./api/schema";
import { checkpoint, detail, ID } from "./samples";
import {
  begin, button, DETAIL, openPage, PIN, problem, rowsOf, SESSION, UNPIN,
} from "./testbed";

const idOf = (step: number) => `gpt:step-${String(step).padStart(8, "0")}.a0001.l01`;

describe("the checkpoints of a run", () => {
  it("are listed with their stage, and why each is kept", async () => {
    openPage("/runs/gpt/checkpoints", { "GET /runs/gpt/checkpoints": { next: null, items: [
      checkpoint({ pinned: true, reason: "pinned by mia", mirrored_at: "2026-01-01T10:11:00Z" }),
      checkpoint({ id: idOf(150), step: 150, rolled_back: true, verified_ok: false }),
      checkpoint({ id: idOf(100), step: 100, state: "deleted", reason: "keep.last 1: older" }),
    ] } });
    await screen.findByText("100");
    const [first, second, third] = rowsOf("Checkpoints");
    expect(first).toMatch(/^200durable, mirrored · pinnedpinned by mia/);
    expect(second).toMatch(/^150damagedrolled back/);
    expect(third).toMatch(/^100deletedkeep\.last 1: older/);
  });

  it("come in pages", async () => {
    openPage("/runs/gpt/checkpoints", { "GET /runs/gpt/checkpoints": ({ query: { after } }) =>
      after === "cursor" ? { items: [checkpoint({ id: idOf(100), step: 100 })], next: null }
        : { items: [checkpoint({})], next: "cursor" } });
    fireEvent.click(await button("Show older"));
    await waitFor(() => expect(rowsOf("Checkpoints")).toHaveLength(2));
    expect(screen.queryByText("Show older")).toBeNull();
  });

  it("are none before the first manifest", async () => {
    openPage("/runs/gpt/checkpoints");
    await screen.findByText("No checkpoints yet");
  });
});

describe("a checkpoint", () => {
  it("is pinned for a reason, after a confirmation, and unpinned again", async () => {
    const server = openPage(`/checkpoints/${ID}`, {
      [PIN]: { checkpoint: ID, pinned: true }, [UNPIN]: { checkpoint: ID, pinned: false },
    });
    let dialog = await begin("Pin");
    fireEvent.change(dialog.getByLabelText("Reason (optional)"), { target: { value: "best" } });
    expect(server.requests()).toEqual([]);
    server.give({ [DETAIL]: detail({ pinned: true, pinned_by: "mia", pin_note: "best" }) });
    fireEvent.click(dialog.getByRole("button", { name: "Pin" }));
    await screen.findByText(/best — mia/);
    // The dialog keeps its action, although the button's is now Unpin.
    expect((await dialog.findByRole("status")).textContent).toBe("Done.");
    expect(dialog.getByRole("heading").textContent).toBe("Pin this checkpoint");
    fireEvent.click(dialog.getByRole("button", { name: "Close" }));
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());

    dialog = await begin("Unpin");
    expect(dialog.getByText(/only the keep rules decide/)).toBeTruthy();
    server.give({ [DETAIL]: detail({}) });
    fireEvent.click(dialog.getByRole("button", { name: "Unpin" }));
    await dialog.findByRole("status");
    expect(server.requests()).toMatchObject([
      { request: PIN, body: { note: "best" }, csrf: "csrf-word" },
      { request: UNPIN, body: {}, csrf: "csrf-word" },
    ]);
    await waitFor(() => expect(screen.queryByText(/best — mia/)).toBeNull());
  });

  it("stays unpinned if the server refuses", async () => {
    const server = openPage(`/checkpoints/${ID}`, { [PIN]: problem(409, "It is being pruned.") });
    const dialog = await begin("Pin");
    fireEvent.click(dialog.getByRole("button", { name: "Pin" }));
    expect((await dialog.findByRole("alert")).textContent).toContain("It is being pruned.");
    // A pin cannot be forced.
    expect(dialog.queryByText("Pin anyway")).toBeNull();
    expect(server.requests()).toHaveLength(1);
  });

  it("cannot be pinned or verified once it is deleted", async () => {
    openPage(`/checkpoints/${ID}`, { [DETAIL]: detail({ state: "deleted", on_disk: false }) });
    const pin = await button("Pin");
    expect(pin.getAttribute("aria-disabled")).toBe("true");
    expect(pin.title).toBe("The checkpoint was deleted.");
    expect(screen.queryByText("Verify")).toBeNull();
    expect(screen.queryByText("Export")).toBeNull();
  });

  it("offers a reader no action", async () => {
    openPage(`/checkpoints/${ID}`, { "GET /session": { ...SESSION, role: "reader" } });
    await screen.findByText("Show in lineage");
    await waitFor(() => expect(screen.queryByText("Pin")).toBeNull());
    expect(screen.queryByText("Verify")).toBeNull();
  });
});

const made = (step: number, fields: Partial<Node> = {}): Node =>
  ({ id: idOf(step), kind: "checkpoint", run: "gpt", state: "committed", step, ...fields });

/** One attempt whose checkpoints follow each other; the one of step 200 is pinned. */
function lineage(steps: number[]): Graph {
  return {
    nodes: [
      { id: "gpt", kind: "run", run: "gpt", state: "running" },
      { id: "gpt:attempt-1", kind: "attempt", run: "gpt", number: 1, state: "preempted",
        cause: "preemption", world_size: 8 },
      ...steps.map((step) => made(step, step === 200 ? { pinned: true, verified: true } : {})),
    ],
    edges: steps.slice(1).map((step, index) =>
      ({ from: idOf(step), to: idOf(steps[index] ?? 0), kind: "parent" })),
  };
}

describe("the lineage", () => {
  it("names each card for assistive technology", async () => {
    openPage("/runs/gpt/lineage", { "GET /runs/gpt/lineage": lineage([100, 200, 300]) });
    await screen.findByLabelText("checkpoint step 200, verified · pinned");
    expect(screen.getByLabelText("checkpoint step 100, durable")).toBeTruthy();
    expect(screen.getByLabelText(/attempt 1, preemption · 8 ranks/)).toBeTruthy();
    expect(screen.getByText(/5 nodes, 5 shown/)).toBeTruthy();
  });

  it("opens a checkpoint by a key", async () => {
    openPage("/runs/gpt/lineage", { "GET /runs/gpt/lineage": lineage([100, 200]) });
    const card = await screen.findByLabelText("checkpoint step 200, verified · pinned");
    fireEvent.keyDown(card, { key: "Enter" });
    const details = await screen.findByLabelText("Selected checkpoint");
    await waitFor(() => expect(details.textContent).toContain("Step 200"));
  });

  it("expands a fold by a key, and folds all again", async () => {
    const steps = Array.from({ length: 9 }, (_, index) => index + 1);
    const whole = lineage(steps);
    const inside = (node: Node) => (node.step ?? 0) > 1 && (node.step ?? 0) < 9;
    const folded: Node = { id: "fold:2…8", kind: "fold", run: "gpt", state: "committed", count: 7,
      first_step: 2, last_step: 8, rolled_back: false };
    const server = openPage("/runs/gpt/lineage", { "GET /runs/gpt/lineage": ({ query }) =>
      query.opened ? whole : {
        nodes: [...whole.nodes.filter((one) => !inside(one)), folded],
        edges: [{ from: idOf(9), to: "fold:2…8", kind: "parent" },
          { from: "fold:2…8", to: idOf(1), kind: "parent" }],
        nodes_total: whole.nodes.length,
      } });
    const fold = await screen.findByLabelText("fold 7 checkpoints, steps 2 – 8; expand");
    expect(screen.getByText(/11 nodes, 5 shown/)).toBeTruthy();
    fireEvent.keyDown(fold, { key: " " });
    await screen.findByLabelText("checkpoint step 5, durable");
    expect(server.requests("GET /runs/gpt/lineage").at(-1)?.query).toEqual(
      { folded: "true", opened: "fold:2…8" });
    fireEvent.click(screen.getByText("Collapse all"));
    await screen.findByLabelText("fold 7 checkpoints, steps 2 – 8; expand");
    expect(screen.queryByLabelText("checkpoint step 5, durable")).toBeNull();
  });

  it("begins with the first attempt", async () => {
    openPage("/runs/gpt/lineage", { "GET /runs/gpt/lineage": { nodes: [], edges: [] } });
    await screen.findByText("No lineage yet");
  });
});
