// @vitest-environment happy-dom
import { fireEvent, screen, waitFor } from "@testing-library/react";
import { describe, expect, it, vi } from "vitest";
import type { ActionDone, AttemptView, ConsumerView, OperatorRequest, Segment } from "./api/schema";
import { attempt, ID, problemOf, run } from "./samples";
import { begin, button, openPage, problem, rowsOf, SESSION, stream, type Server } from "./testbed";

const OUTPUT = { selector: "output" };
const at = (minute: number) => `2026-01-01T10:${String(minute).padStart(2, "0")}:00Z`;

const PREEMPTED = attempt({
  state: "preempted", cause: "preemption", evidence: ["scheduler: PREEMPTED"], job_id: "41",
  world_size: 8, gpus: 8, first_step: 1, last_step: 230, committed_step: 200, started_at: at(0),
  ended_at: at(20),
});
const FAILED = attempt({
  number: 2, state: "failed", cause: "out_of_memory", failed_rank: 1, first_step: 201,
  last_step: 210, traceback: "CUDA out of memory", started_at: at(20), ended_at: at(30),
});

const segment = (of: number, part: string, from: number, to: number): Segment =>
  ({ attempt: of, part, began_at: at(from), ended_at: at(to) });

const asked = (action: string): OperatorRequest =>
  ({ number: 1, action, by: "mia", at: 0, gpus: null, after_attempt: 1, state: "done",
    detail: "" });

describe("the attempts of a run", () => {
  it("are listed, newest first, with their ends, causes, steps and evidence", async () => {
    const attempts = [PREEMPTED, FAILED, attempt({ number: 3, reason: "after out of memory" })];
    openPage("/runs/gpt", { "GET /runs/gpt": run({ attempts }) });
    await screen.findByText("#3");
    const [third, second, traceback, first, evidence] = rowsOf("Attempts");
    expect(first).toMatch(/^#18 GPUs · job 41preempted.*preemption1 – 230committed 200/);
    expect(evidence).toBe("scheduler: PREEMPTED");
    expect(second).toMatch(/^#22 GPUsfailed.*out of memory201 – 210none committed/);
    expect(traceback).toBe("Traceback of rank 1CUDA out of memory");
    expect(third).toMatch(/^#32 GPUsrunning.*after out of memory—/);
  });

  it("that an operator ended name the operator", async () => {
    const paused = { ...PREEMPTED, state: "cancelled", cause: "operator", evidence: [] };
    openPage("/runs/gpt", { "GET /runs/gpt": run({
      state: "paused", attempts: [paused], requests: [asked("pause")] }) });
    await screen.findByText("#1");
    expect(rowsOf("Attempts")[0]).toMatch(/GPUs · job 41paused.*paused by mia/);
  });

  it("have a list of the orders, with what became of each", async () => {
    const detail = "the scheduler does not answer";
    const requests: OperatorRequest[] = [
      { ...asked("pause"), state: "overtaken", detail: "by order 2" },
      { ...asked("relaunch"), number: 2, gpus: 4, state: "pending", detail },
    ];
    openPage("/runs/gpt", { "GET /runs/gpt": run({ requests }) });
    await screen.findByText("Orders");
    const [newest, oldest] = rowsOf("Orders");
    expect(newest).toContain(`2relaunch at 4 GPUs by miapending${detail}`);
    expect(oldest).toContain("1pause by miaovertakenby order 2");
  });

  it("have a list of the consumers of checkpoints", async () => {
    const consumer: ConsumerView = {
      name: "eval", event: "commit", checkpoint: ID, step: 200, state: "given_up", tries: 3,
      start: 4, log: "/r/consumers/0004/output.log", reason: "it ended with exit status 7",
      changed_at: at(10), metrics: {},
    };
    openPage("/runs/gpt", { "GET /runs/gpt": run({ consumers: [consumer] }) });
    await screen.findByText("Consumers");
    expect(rowsOf("Consumers")[0]).toContain(
      "eval on commit200given upit ended with exit status 73/r/consumers/0004/output.log");
  });

  it("in several places have a row for each stretch, with its cost", async () => {
    const spot = {
      place: 0, name: "spot", first: 1, last: 2, began_at: 0, ended_at: 3600, ettr: 0.5,
      steps_lost: 0, gpu_hours: 8, cost: 8, preemption_cost: 1, on_demand_cost: 24, saved: 16,
      currency: "USD",
    };
    const prod = { ...spot, place: 1, name: "prod", first: 3, last: 3, cost: 24, ettr: 0.95 };
    openPage("/runs/gpt", { "GET /runs/gpt": run({ stretches: [spot, prod] }) });
    await screen.findByText("Where it ran");
    const [first, second] = rowsOf("Where it ran");
    expect(first).toBe("spot1–21 h50.0 %8.08.00 USD24.00 USD");
    expect(second).toMatch(/^prod3/);
  });

  it("are drawn over time, with what each did and its checkpoints", async () => {
    openPage("/runs/gpt", {
      "GET /runs/gpt": run({ attempts: [PREEMPTED, FAILED] }),
      "GET /runs/gpt/timeline": [segment(1, "queued", 0, 5), segment(1, "training", 5, 20),
        segment(2, "training", 20, 30)],
    });
    const drawn = await screen.findByRole("application", { name: /^2 attempts in 30 min\./ });
    const titles = [...drawn.querySelectorAll("title")].map((one) => one.textContent);
    expect(titles.map((one) => one?.split(", from")[0])).toEqual(
      ["attempt 1, queued: 5 min", "attempt 1, productive: 15 min",
        "attempt 2, productive: 10 min"]);
    for (const key of ["ArrowRight", "ArrowRight"]) fireEvent.keyDown(drawn, { key });
    expect(await screen.findByText(/^attempt 1, productive: 15 min, from/, OUTPUT)).toBeTruthy();
    fireEvent.keyDown(drawn, { key: "ArrowLeft" });
    expect(await screen.findByText(/^attempt 1, queued: 5 min, from/, OUTPUT)).toBeTruthy();
  });

  it("are the newest ones if there are many, until all are asked for", async () => {
    const attempts = Array.from({ length: 8 }, (_, index): AttemptView =>
      ({ ...PREEMPTED, number: index + 1, evidence: [] }));
    openPage("/runs/gpt", { "GET /runs/gpt": run({ attempts }) });
    const more = await button("Show all 8 attempts");
    expect(rowsOf("Attempts").map((row) => row?.slice(0, 2))).toEqual(
      ["#8", "#7", "#6", "#5", "#4", "#3"]);
    fireEvent.click(more);
    expect(rowsOf("Attempts")).toHaveLength(8);
  });

  it("are none before the scheduler accepts one", async () => {
    openPage("/runs/gpt", { "GET /runs/gpt": run({ attempts: [], state: "queued", step: null }) });
    await screen.findByText("No attempt yet");
    expect(screen.getByText("none yet")).toBeTruthy();
  });
});

describe("the warnings of a run", () => {
  it("name a dead agent and what helps", async () => {
    openPage("/runs/gpt", { "GET /runs/gpt": run({}), "GET /attention": [
      problemOf("silent", { text: "the agent on gpu-1 of attempt 1 is dead", action: "Relaunch" }),
    ] });
    expect((await screen.findByText(/agent on gpu-1/)).textContent).toBe(
      "the agent on gpu-1 of attempt 1 is dead. What helps: Relaunch.");
  });

  it("name a missing supervisor, a missing folder and failed saves", async () => {
    openPage("/runs/gpt", { "GET /runs/gpt": run({
      on_disk: false,
      supervision: { is_alive: false, is_remote: false, host: "login1", pid: 7 },
      failed_saves: [{ checkpoint: ID, step: 200, error: "disk full", at: 0 }],
      noticed: [{ kind: "hang_suspected", attempt: 9, at: 0, text: "rank 3 hangs", dumps: [] }],
    }) });
    await screen.findByText("no supervisor");
    expect(screen.getByRole("alert").textContent).toContain("login1 (pid 7)");
    expect(screen.getByText(/folder does not exist/)).toBeTruthy();
    expect(screen.getByText(/step 200 was not committed: disk full/).closest("details")).toBeNull();
    // Notices of other attempts are folded.
    expect(screen.getByText(/rank 3 hangs/).closest("details")?.textContent).toContain(
      "1 earlier notice");
  });

  it("name what the running launch lacks, with what helps", async () => {
    const lack = (lacks: "copies" | "spares", text: string) =>
      ({ lacks, host: null, text, action: `end ${lacks}`, at: 1767261600 });
    openPage("/runs/gpt", { "GET /runs/gpt": run({ unprotected: [
      lack("copies", "n1: no memory"), lack("copies", "n2: no memory"), lack("spares", "all used"),
    ] }) });
    expect((await screen.findAllByText("unprotected")).length).toBe(1);
    expect(screen.getAllByText("no spare node left").length).toBe(1);
    const shown = screen.getAllByText(/What helps: end/).map((one) => one.textContent);
    expect(shown.map((text) => text?.slice(0, text.lastIndexOf(".") + 1))).toEqual([
      "n1: no memory. What helps: end copies.", "n2: no memory. What helps: end copies.",
      "all used. What helps: end spares."]);
  });

  it("are an error alone if the run is unknown", async () => {
    openPage("/runs/gpt", { "GET /runs/gpt": problem(404, "No run is named gpt.") });
    expect((await screen.findByRole("alert")).textContent).toBe("Not found.No run is named gpt.");
    expect(screen.queryByText("Overview")).toBeNull();
  });
});

const done = (action: string, message: string): ActionDone =>
  ({ run: "gpt", action, gpus: null, message, state: "running" });

describe("an operator's action", () => {
  it.each([
    ["Stop", "stop", "running", "saves a final checkpoint and ends"],
    ["Pause", "pause", "running", "releases its 2 GPUs until the run is resumed"],
    ["Resume", "resume", "paused", "resumes from its newest checkpoint"],
  ] as const)("%s is confirmed, sent once, and answered", async (word, action, state, what) => {
    const server = openPage("/runs/gpt", {
      "GET /runs/gpt": run({ state }),
      [`POST /runs/gpt/${action}`]: done(action, `${word} was recorded.`),
    });
    const dialog = await begin(word);
    expect(dialog.getByRole("heading").textContent).toBe(`${word} gpt`);
    expect(dialog.getByText(/newest|final/).textContent?.replace(/\s+/g, " ")).toContain(what);
    expect(server.requests()).toEqual([]);
    fireEvent.click(dialog.getByRole("button", { name: word }));
    expect((await dialog.findByRole("status")).textContent).toBe(`${word} was recorded.`);
    expect(server.requests()).toEqual([
      { request: `POST /runs/gpt/${action}`, query: {}, body: {}, csrf: "csrf-word" }]);
    fireEvent.click(dialog.getByRole("button", { name: "Close" }));
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
  });

  it.each([
    ["Stop", "ends. No rank has opened a Session, so nothing is saved."],
    ["Relaunch", "Attempt 1 ends. No rank has opened a Session, so nothing is saved."],
  ] as const)("%s promises no checkpoint if no rank has a Session", async (word, what) => {
    openPage("/runs/gpt", {
      "GET /runs/gpt": run({ state: "running", saves_by_holdfast: false }),
    });
    expect(await screen.findByText("never: the program has no Session")).toBeTruthy();
    const dialog = await begin(word);
    expect(dialog.getByText(/nothing is saved/).textContent).toContain(what);
  });

  it("Cancel becomes Cancel now while the run saves its final checkpoint", async () => {
    const server = openPage("/runs/gpt", {
      "GET /runs/gpt": run({ requests: [{ ...asked("cancel"), state: "taken" }] }),
      "POST /runs/gpt/cancel": done("cancel", "Attempt 1 ends now."),
    });
    const dialog = await begin("Cancel now");
    expect(dialog.getByText(/ends at once/).textContent).toContain("are lost");
    fireEvent.click(dialog.getByRole("button", { name: "Cancel now" }));
    await dialog.findByText("Attempt 1 ends now.");
    expect(server.requests().map((one) => one.body)).toEqual([{ now: true }]);
  });

  it("is not sent if the operator goes back", async () => {
    const server = openPage("/runs/gpt");
    const dialog = await begin("Stop");
    fireEvent.click(dialog.getByRole("button", { name: "Back" }));
    await waitFor(() => expect(screen.queryByRole("dialog")).toBeNull());
    expect(server.requests()).toEqual([]);
  });

  it("Relaunch sends the size that was entered", async () => {
    const server = openPage("/runs/gpt",
      { "POST /runs/gpt/relaunch": done("relaunch", "Attempt 2 will have 4 GPUs.") });
    const dialog = await begin("Relaunch");
    const size = dialog.getByLabelText<HTMLInputElement>(
      "GPUs of the next attempt (allowed: 1 to 16)");
    expect(size.value).toBe("2");
    expect(dialog.getByText(/Attempt 1 saves a final checkpoint/)).toBeTruthy();
    fireEvent.change(size, { target: { value: "4" } });
    fireEvent.click(dialog.getByRole("button", { name: "Relaunch" }));
    await dialog.findByText("Attempt 2 will have 4 GPUs.");
    expect(server.requests().map((one) => one.body)).toEqual([{ gpus: 4 }]);
  });

  it("can be forced while another request is pending", async () => {
    const server = openPage("/runs/gpt",
      { "POST /runs/gpt/stop": problem(409, "ann asked to pause the run.") });
    const dialog = await begin("Stop");
    fireEvent.click(dialog.getByRole("button", { name: "Stop" }));
    expect((await dialog.findByRole("alert")).textContent).toBe(
      "Conflicting request.ann asked to pause the run.");
    server.give({ "POST /runs/gpt/stop": done("stop", "Recorded.") });
    fireEvent.click(dialog.getByRole("button", { name: "Stop anyway" }));
    await dialog.findByText("Recorded.");
    expect(server.requests().map((one) => one.body)).toEqual([{}, { force: true }]);
  });

  it.each([
    ["403", problem(403, "Ask mia."), "Your role does not allow this.Ask mia."],
    ["422", problem(422, "No such size."), "This cannot be done.No such size."],
    ["no answer", "away", "No response; the action may have been applied.The server did not"],
  ] as const)("that fails with %s shows the error and forces nothing", async (_, answer, text) => {
    const server = openPage("/runs/gpt", { "POST /runs/gpt/stop": answer });
    const dialog = await begin("Stop");
    fireEvent.click(dialog.getByRole("button", { name: "Stop" }));
    expect((await dialog.findByRole("alert")).textContent).toContain(text);
    expect(dialog.queryByRole("status")).toBeNull();
    fireEvent.click(dialog.getByRole("button", { name: "Stop" }));
    await waitFor(() => expect(server.requests()).toHaveLength(2));
    expect(server.requests()[1]?.body).toEqual({});
  });

  it("is possible only while the run is live, except for Relaunch", async () => {
    openPage("/runs/gpt", { "GET /runs/gpt": run({ state: "completed" }) });
    const isDisabled = async (name: string) =>
      (await button(name)).getAttribute("aria-disabled") === "true";
    expect(await isDisabled("Stop")).toBe(true);
    expect(await isDisabled("Pause")).toBe(true);
    expect(await isDisabled("Cancel")).toBe(true);
    expect(await isDisabled("Relaunch")).toBe(false);
  });

  it("that is disabled says why when it is pressed, and sends nothing", async () => {
    const server = openPage("/runs/gpt", { "GET /runs/gpt": run({ state: "completed" }) });
    const dialog = await begin("Stop");
    expect(dialog.getByText("The run is not live.")).toBeTruthy();
    expect(dialog.queryByRole("button", { name: "Stop" })).toBeNull();
    fireEvent.click(dialog.getByRole("button", { name: "Close" }));
    expect(server.requests()).toHaveLength(0);
  });

  it("that the run would refuse is disabled, with the reason beside it", async () => {
    const refusals = { relaunch: "run gpt is completed; fork one of its checkpoints" };
    openPage("/runs/gpt", { "GET /runs/gpt": run({ state: "completed", refusals }) });
    expect((await button("Relaunch")).getAttribute("aria-disabled")).toBe("true");
    expect(screen.getByText(refusals.relaunch)).toBeTruthy();
  });

  it("says its price: the steps at risk, and when the run trains again", async () => {
    openPage("/runs/gpt", {
      "GET /runs/gpt": run({ live_step: 260, step_s: 0.5 }),
      "GET /runs/gpt/timeline": [segment(1, "queued", 0, 3), segment(1, "loading", 3, 4),
        segment(1, "training", 4, 20)],
    });
    const dialog = await begin("Relaunch");
    expect(dialog.getByText(/If it fails/).textContent).toContain("60 steps (30 s of training)");
    const later = await dialog.findByText(/Training then continues/);
    expect(later.textContent).toContain("about 4 min");
  });

  it("of a queued attempt promises no checkpoint", async () => {
    openPage("/runs/gpt", { "GET /runs/gpt": run({ attempts: [attempt({})], state: "queued" }) });
    const dialog = await begin("Stop");
    expect(dialog.getByText(/removed from the queue/)).toBeTruthy();
    expect(dialog.queryByText(/final checkpoint/)).toBeNull();
  });

  it("keeps its dialog open until the server has answered", async () => {
    const answers: ((answer: Response) => void)[] = [];
    const server = openPage("/runs/gpt");
    const dialog = await begin("Stop");
    vi.stubGlobal("fetch", (path: string, init: RequestInit = {}) =>
      init.method === "POST" ? new Promise<Response>((resolve) => answers.push(resolve))
        : server.fetch(path, init));
    fireEvent.click(dialog.getByRole("button", { name: "Stop" }));
    await dialog.findByText("Sending…");
    fireEvent.keyDown(screen.getByRole("dialog"), { key: "Escape" });
    expect(dialog.getByRole("button", { name: "Back" }).hasAttribute("disabled")).toBe(true);
    expect(screen.getByRole("dialog")).toBeTruthy();
    for (const answer of answers) answer(Response.json(done("stop", "Recorded.")));
    await dialog.findByText("Recorded.");
  });

  it("is not offered to a reader", async () => {
    openPage("/runs/gpt", { "GET /session": { ...SESSION, role: "reader" } });
    await screen.findByText("Read-only");
    expect(screen.queryByText("Stop")).toBeNull();
    expect(screen.queryByText("Relaunch")).toBeNull();
  });
});

describe("an open event stream", () => {
  /** Opens the stream, and waits for the requests with which the page catches up. */
  async function live(server: Server) {
    const asked = () => server.requests("GET /runs/gpt").length;
    const before = asked();
    stream().onopen();
    await screen.findByText("live");
    await waitFor(() => expect(asked()).toBeGreaterThan(before));
  }

  it("replaces the polling, and an action changes the page at once", async () => {
    const server = openPage("/runs/gpt", { "POST /runs/gpt/stop": done("stop", "Recorded.") });
    const dialog = await begin("Stop");
    await live(server);
    server.give({ "GET /runs/gpt": run({ requests: [asked("stop")] }) });
    fireEvent.click(dialog.getByRole("button", { name: "Stop" }));
    await dialog.findByText("Recorded.");
    expect(await screen.findAllByText("stopping")).not.toHaveLength(0);
  });

  it("updates the run that an event is about", async () => {
    const server = openPage("/runs/gpt");
    await button("Stop");
    await live(server);
    server.give({ "GET /runs/gpt": run({ state: "completed" }) });
    stream().send("journal", { run: "gpt" });
    await screen.findByText("completed");
  });
});
