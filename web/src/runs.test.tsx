// @vitest-environment happy-dom
import { cleanup, fireEvent, screen, waitFor } from "@testing-library/react";
import { describe, expect, it } from "vitest";
import type {
  ActionDone, OperatorRequest, RunDetail, RunLine, RunPage, UnreadableRun,
} from "./api/schema";
import { attempt, line, problemOf, run } from "./samples";
import { begin, button, LOGGED_OUT, openPage, problem, rowsOf, SESSION } from "./testbed";

const page = (items: RunLine[], more: Partial<RunPage> = {}): RunPage =>
  ({ items, next: null, unreadable: [], ...more });

const GPT = line("gpt", { step: 250 });
const VIT = line("vit", { state: "failed", cause: "out_of_memory", attempts: 3 });
const BROKEN: UnreadableRun[] = [
  { run: "old", path: "/runs/old", reason: "spec.json: permission denied" },
  { run: "older", path: "/runs/older", reason: "spec.json: not JSON" },
];

const runs = () => rowsOf("Runs");

describe("the list of runs", () => {
  it("shows the state, the cause and the progress of each run", async () => {
    openPage("/", { "GET /runs": page([GPT, VIT]) });
    await screen.findByText("vit");
    expect(runs()[0]).toMatch(/^runninggptby mia.*250 of 1,000/);
    expect(runs()[1]).toMatch(/^failedvitout of memory.*3 attempts/);
    expect(screen.queryByText(/cannot be read/)).toBeNull();
  });

  it("asks the server for one state, and says if no run has it", async () => {
    openPage("/", { "GET /runs": ({ query: { state } }) =>
      page([GPT, VIT].filter((one) => !state || one.state === state)) });
    await screen.findByText("vit");
    fireEvent.change(screen.getByLabelText("State"), { target: { value: "failed" } });
    await waitFor(() => expect(runs()).toHaveLength(1));
    expect(runs()[0]).toContain("vit");
    fireEvent.change(screen.getByLabelText("State"), { target: { value: "paused" } });
    await screen.findByText("No matching runs");
    fireEvent.click(screen.getByText("Show all runs"));
    await screen.findByText("gpt");
    expect(runs()).toHaveLength(2);
    expect(screen.getByLabelText<HTMLSelectElement>("State").value).toBe("");
  });

  it("searches by name once the typing has ended", async () => {
    const server = openPage("/", { "GET /runs": ({ query: { search = "" } }) =>
      page([GPT, VIT].filter((one) => one.run.includes(search))) });
    await screen.findByText("vit");
    const box = screen.getByLabelText<HTMLInputElement>("Search runs by name");
    fireEvent.change(box, { target: { value: "g" } });
    fireEvent.change(box, { target: { value: "gp" } });
    await waitFor(() => expect(runs()).toHaveLength(1));
    expect(runs()[0]).toContain("gpt");
    expect(box.value).toBe("gp");
    const searched = new Set(server.requests("GET /runs").map((one) => one.query.search));
    expect([...searched]).toEqual([undefined, "gp"]);
  });

  it("takes the search text from the address", async () => {
    openPage("/?search=vi",
      { "GET /runs": ({ query: { search } }) => page(search ? [VIT] : [GPT]) });
    await screen.findByText("vit");
    expect(screen.getByLabelText<HTMLInputElement>("Search runs by name").value).toBe("vi");
  });

  it("takes a search text that looks like a number as it is written", async () => {
    for (const words of ["2024", "1e5", "true"]) {
      const server = openPage(`/?search=${words}`, { "GET /runs": page([GPT]) });
      await screen.findByText("gpt");
      expect(server.requests("GET /runs").at(-1)?.query.search).toBe(words);
      expect(screen.getByLabelText<HTMLInputElement>("Search runs by name").value).toBe(words);
      cleanup();
    }
  });

  it("filters on the server, from and into the address", async () => {
    const server = openPage("/?user=ann&since=day&cause=gone", { "GET /runs": page([GPT]) });
    await screen.findByText("gpt");
    const asked = () => server.requests("GET /runs").at(-1)?.query ?? {};
    expect(asked()).toMatchObject({ user: "ann", cause: "gone", created_within: "86400" });
    expect(screen.getByText("Filters (3)")).toBeTruthy();
    // A value that no run has stays chosen.
    expect(screen.getByLabelText<HTMLSelectElement>("Last cause").value).toBe("gone");
    fireEvent.change(screen.getByLabelText("Last cause"), { target: { value: "node_failure" } });
    await waitFor(() => expect(asked().cause).toBe("node_failure"));
    fireEvent.change(screen.getByLabelText("Partition"), { target: { value: "a100" } });
    fireEvent.click(screen.getByLabelText("Needs attention"));
    await waitFor(() => expect(asked()).toMatchObject(
      { user: "ann", cause: "node_failure", partition: "a100", attention: "true" }));
    const link = screen.getByText("CSV").getAttribute("href") ?? "";
    expect(link).toMatch(/tables\/runs\?.*user=ann.*format=csv/);
  });

  it("lets the server sort, up, down and as before", async () => {
    const server = openPage("/", { "GET /runs": page([GPT]) });
    const asked = () => {
      const { sort, order } = server.requests("GET /runs").at(-1)?.query ?? {};
      return [sort, order];
    };
    fireEvent.click(await button("Run"));
    await waitFor(() => expect(asked()).toEqual(["name", "asc"]));
    fireEvent.click(await button("Run ▲"));
    await waitFor(() => expect(asked()).toEqual(["name", "desc"]));
    fireEvent.click(await button("Run ▼"));
    await waitFor(() => expect(asked()).toEqual(["live", undefined]));
  });

  it("adds the next page, and keeps what the first one said of unreadable runs", async () => {
    openPage("/", { "GET /runs": ({ query: { after } }) =>
      after === "cursor" ? page([VIT]) : page([GPT], { next: "cursor", unreadable: BROKEN }) });
    fireEvent.click(await button("Show more"));
    await waitFor(() => expect(runs()).toHaveLength(2));
    expect(screen.queryByText("Show more")).toBeNull();
    expect(screen.getByText("2 runs cannot be read")).toBeTruthy();
  });

  it("names the runs that cannot be read, with the reasons, even if it has no other", async () => {
    openPage("/", { "GET /runs": page([], { unreadable: BROKEN }) });
    const summary = await screen.findByText("2 runs cannot be read");
    const lines = [...summary.closest("details")?.querySelectorAll("li") ?? []];
    expect(lines.map((one) => one.textContent)).toEqual(
      ["/runs/old: spec.json: permission denied", "/runs/older: spec.json: not JSON"]);
  });

  it("shows the row of a run whose values are odd, and all others", async () => {
    const odd = { ...VIT, goodput: { total_s: "long" } } as unknown as RunLine;
    openPage("/", { "GET /runs": page([odd, GPT]) });
    await screen.findByText("gpt");
    expect(runs()[0]).toContain("vit");
  });

  it("sorts as the address says", async () => {
    const server = openPage("/?sort=-step", { "GET /runs": page([GPT]) });
    await button("Progress ▼");
    expect(server.requests("GET /runs")[0]?.query).toMatchObject({ sort: "step", order: "desc" });
  });

  it("says how to submit the first run", async () => {
    openPage("/", { "GET /runs": page([]) });
    await screen.findByText("No runs yet");
    expect(screen.getByText("holdfast submit spec.toml")).toBeTruthy();
  });

  it("shows the server's error", async () => {
    openPage("/", { "GET /runs": problem(500, "The index is locked.") });
    expect((await screen.findByRole("alert")).textContent).toBe(
      "The server returned status 500.The index is locked.");
  });

  it("keeps its rows while the server is away, and says so until it is back", async () => {
    const server = openPage("/", { "GET /runs": page([GPT]) });
    const sort = await button("Run");
    server.give({ "GET /runs": "away", "GET /session": "away" });
    fireEvent.click(sort);
    expect((await screen.findByRole("alert")).textContent).toMatch(
      /has not answered since.*The data on this page is from/);
    expect(runs()).toHaveLength(1);
    server.give({ "GET /runs": page([GPT, VIT]), "GET /session": SESSION });
    await screen.findByText("vit");
    expect(screen.queryByRole("alert")).toBeNull();
  });
});

describe("what needs attention", () => {
  const block = () => screen.findByRole("region", { name: "Needs attention" });

  it("is on top, and is named in the run's row", async () => {
    openPage("/", { "GET /runs": page([GPT, VIT]), "GET /attention": [
      problemOf("unsupervised", { text: "no supervisor is running", action: "Relaunch it" }),
      problemOf("silent", { level: "warn" }), problemOf("node_slow", { level: "warn" })] });
    expect((await block()).textContent).toMatch(
      /^Needs attention: 1 urgent, 2 to watchno supervisorgpt: no supervisor is running/);
    expect((await block()).textContent).toContain("What helps: Relaunch it.");
    await waitFor(() => expect(runs()[0]).toMatch(/^runningno supervisorno heartbeatsgpt/));
    expect(runs()[1]).toMatch(/^failedvit/);
  });

  it("folds many problems of one kind", async () => {
    const many = Array.from({ length: 5 }, (_, index) =>
      problemOf("hung", { id: `hung:${index}`, run: `gpt-${index}` }));
    openPage("/", { "GET /runs": page([GPT]), "GET /attention": [...many, problemOf("silent")] });
    const summary = await screen.findByText(/5 runs, such as gpt-0/);
    expect(summary.closest("details")?.querySelectorAll("li")).toHaveLength(5);
    expect((await block()).querySelectorAll("section > ul > li")).toHaveLength(1);
  });

  it("is acknowledged with a note, and then says by whom", async () => {
    const done = { by: "mia", at: "2026-01-01T10:00:00Z", note: "storage is called" };
    const server = openPage("/", { "GET /runs": page([GPT]),
      "GET /attention": [problemOf("saves_fail")],
      "POST /attention/acknowledge": problemOf("saves_fail", { acknowledged: done }) });
    const dialog = await begin("Acknowledge saves fail of gpt");
    fireEvent.change(dialog.getByLabelText("Note for others (optional)"),
      { target: { value: done.note } });
    server.give({ "GET /attention": [problemOf("saves_fail", { acknowledged: done })] });
    fireEvent.click(dialog.getByRole("button", { name: "Acknowledge" }));
    // The note that counts may be that of someone else who was first.
    await dialog.findByText((_, one) => one?.getAttribute("role") === "status" &&
      one.textContent === "Acknowledged by mia: storage is called. Only the first "
        + "acknowledgement counts.");
    expect(server.requests().map((one) => one.body)).toEqual(
      [{ id: "uid-gpt:saves_fail:1", note: "storage is called" }]);
    await screen.findByText("Nothing new needs attention");
    // The item has moved, and the dialog still has the answer.
    fireEvent.click(dialog.getByRole("button", { name: "Close" }));
    expect((await block()).textContent).toMatch(/1 acknowledged.*by mia, .*: storage is called/);
  });

  it("shows a reader no button", async () => {
    openPage("/", { "GET /runs": page([GPT]), "GET /attention": [problemOf("hung")],
      "GET /session": { ...SESSION, role: "reader" } });
    await screen.findByText("hung", { selector: ".attention span" });
    await waitFor(() => expect(screen.queryByText("Acknowledge")).toBeNull());
  });
});

describe("several runs at once", () => {
  const done = (name: string, action: string): ActionDone => ({ run: name, action, gpus: null,
    message: `${name} will ${action}.`, state: "running", flow_run: null, url: null, pid: null });
  const select = async (...names: string[]) => {
    for (const name of names) fireEvent.click(await screen.findByLabelText(`Select ${name}`));
  };
  const live = { started_at: "2026-01-01T10:00:00Z" };
  const vit = (fields: Partial<RunDetail> = {}) => run({ run: "vit", uid: "uid-vit", ...fields });

  it("names each run's price, sends one order each, and shows each answer", async () => {
    const server = openPage("/", {
      "GET /runs": page([GPT, line("vit")]),
      "GET /runs/gpt": run({ live_step: 212, attempts: [attempt(live)] }),
      "GET /runs/vit": vit({ state: "failed", refusals: { pause: "The run has failed." } }),
      "POST /runs/gpt/pause": done("gpt", "pause") });
    await select("gpt", "vit");
    const dialog = await begin("Pause…");
    await dialog.findByText(/loses 12 steps/);
    await dialog.findByText("Left out: The run has failed.");
    const order: OperatorRequest = { number: 1, action: "pause", by: "mia", at: 0, gpus: null,
      after_attempt: 1, state: "taken", detail: "the attempt saves" };
    server.give({ "GET /runs/gpt": run({ requests: [order] }) });
    fireEvent.click(dialog.getByRole("button", { name: "Pause 1 run" }));
    await dialog.findByText("gpt will pause.");
    await dialog.findByText("Order 1 (pause by mia): taken");
    // All have answered, so nothing is left to send.
    await waitFor(() => expect(dialog.queryByRole("button", { name: /^Pause/ })).toBeNull());
    expect(server.requests().map((one) => one.request)).toEqual(["POST /runs/gpt/pause"]);
  });

  it("asks only the run again whose answer did not arrive", async () => {
    const server = openPage("/", {
      "GET /runs": page([GPT, line("vit")]),
      "GET /runs/gpt": run({}), "GET /runs/vit": vit(),
      "POST /runs/gpt/stop": done("gpt", "stop"), "POST /runs/vit/stop": "away" });
    fireEvent.click(await screen.findByLabelText("Select all runs shown"));
    await screen.findByText("2 selected");
    const dialog = await begin("Stop…");
    fireEvent.click(await dialog.findByRole("button", { name: "Stop 2 runs" }));
    await dialog.findByText("No response.");
    server.give({ "POST /runs/vit/stop": problem(409, "stop by mia is pending") });
    fireEvent.click(await dialog.findByRole("button", { name: "Stop 1 run again" }));
    await dialog.findByText("stop by mia is pending");
    expect(server.requests().map((one) => one.request)).toEqual(
      ["POST /runs/gpt/stop", "POST /runs/vit/stop", "POST /runs/vit/stop"]);
    fireEvent.click(dialog.getByRole("button", { name: "Close" }));
    fireEvent.click(await button("Clear"));
    await waitFor(() => expect(screen.queryByRole("toolbar")).toBeNull());
  });

  it("is not offered to a reader", async () => {
    openPage("/", { "GET /runs": page([GPT]), "GET /session": { ...SESSION, role: "reader" } });
    await screen.findByText("gpt");
    await waitFor(() => expect(screen.queryByLabelText("Select gpt")).toBeNull());
  });
});

describe("the log-in", () => {
  const refused = problem(401, "A token is required.");

  it("shows why a token is refused, and opens the page with a right one", async () => {
    const server = openPage("/", {
      "GET /session": LOGGED_OUT, "GET /runs": refused,
      "POST /session": problem(401, "Unknown token."),
    });
    fireEvent.change(await screen.findByLabelText("Token"), { target: { value: " hold_1 " } });
    fireEvent.click(await button("Log in"));
    expect((await screen.findByRole("alert")).textContent).toBe(
      "Invalid token.Unknown token.");
    expect(server.requests().map((one) => one.body)).toEqual([{ token: "hold_1" }]);
    server.give(
      { "GET /session": SESSION, "POST /session": SESSION, "GET /runs": page([GPT]) });
    fireEvent.click(await button("Log in"));
    await screen.findByText("gpt");
    expect(screen.queryByLabelText("Token")).toBeNull();
  });

  it("comes when the session has ended", async () => {
    const server = openPage("/", { "GET /runs": page([GPT]) });
    const sort = await button("Run");
    server.give({ "GET /session": LOGGED_OUT, "GET /runs": refused });
    fireEvent.click(sort);
    await screen.findByLabelText("Token");
    expect(screen.queryByText("gpt")).toBeNull();
  });

  it("comes after logging out", async () => {
    const server = openPage("/", { "GET /runs": page([GPT]), "DELETE /session": null });
    const logOut = await button("Log out mia");
    server.give({ "GET /session": LOGGED_OUT, "GET /runs": refused });
    fireEvent.click(logOut);
    await screen.findByLabelText("Token");
    expect(server.requests()).toMatchObject([{ request: "DELETE /session", csrf: "csrf-word" }]);
  });
});

it("says that an address has no page", async () => {
  openPage("/nowhere");
  await screen.findByText("Page not found");
});
