// @vitest-environment happy-dom
import { fireEvent, screen, waitFor } from "@testing-library/react";
import { describe, expect, it } from "vitest";
import type { RunLine, RunPage, UnreadableRun } from "./api/schema";
import { line } from "./samples";
import { button, LOGGED_OUT, openPage, problem, rowsOf, SESSION } from "./testbed";

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
    expect(runs()[0]).toMatch(/^runninggptby mia.*250 of 1\u202f000/);
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
      "You are not logged in.Unknown token.");
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
