// The frame of every page: navigation, connection status, theme and login.
import { Dialog, DialogDismiss, DialogHeading, useDialogStore } from "@ariakit/react";
import { useQueryClient } from "@tanstack/react-query";
import { Link, Outlet, useNavigate, useRouterState } from "@tanstack/react-router";
import { useCallback, useEffect, useRef, useState } from "react";
import { useConnection, useLive, type Connection } from "./api/live";
import { serverTime } from "./clock";
import { isLoggedOut, useLogOut, useSession } from "./api/session";
import { Login } from "./pages/Login";
import { State, useNow } from "./parts/basics";
import { exact, relative } from "./format";
import { useKeptFocus } from "./focus";
import { areKeysOn, GO, setKeys, useKeys } from "./keyboard";
import { PREFIX } from "./prefix";
import { useTheme, type Theme } from "./theme";

const PAGES = [
  ["/", "Runs"],
  ["/queue", "Queue"],
  ["/goodput", "Goodput"],
  ["/nodes", "Nodes"],
  ["/storage", "Storage"],
  ["/compare", "Compare"],
] as const;

const WORDS: Record<Connection, [string, string]> = {
  connecting: ["starting", "connecting"],
  live: ["alive", "live"],
  polling: ["waiting", "polling"],
  away: ["silent", "unreachable"],
};

/** The time of the newest data on this page, over all queries. */
function useDataAge(): number {
  const client = useQueryClient();
  return Math.max(0, ...client.getQueryCache().getAll().map((one) => one.state.dataUpdatedAt));
}

function Banner() {
  const { connection, since } = useConnection();
  const now = useNow();
  const updated = useDataAge();
  if (connection !== "away") return null;
  return (
    <div className="banner" role="alert">
      <strong>The server has not answered since {exact(serverTime(since))}.</strong>{" "}
      {updated > 0
        ? `The data on this page is from ${relative(serverTime(updated), now)}. `
          + "Runs continue without it."
        : "Runs continue without this page."}{" "}
      Retrying every few seconds.
    </div>
  );
}

function ThemeChoice() {
  const [theme, setTheme] = useTheme();
  return (
    <select
      aria-label="Theme"
      value={theme}
      onChange={(event) => setTheme(event.target.value as Theme)}
    >
      <option value="system">System</option>
      <option value="light">Light</option>
      <option value="dark">Dark</option>
    </select>
  );
}

function Bar({ help }: { help: () => void }) {
  const { connection } = useConnection();
  const session = useSession();
  // Without a session the page shows nothing live.
  const isOut = connection !== "away" && isLoggedOut(session.data);
  const logOut = useLogOut();
  const [state, word] = WORDS[connection];
  return (
    <header className="bar">
      <Link to="/" className="mark">
        <img src={`${PREFIX}/icon.svg`} width="22" height="22" alt="" />
        Holdfast
      </Link>
      <nav aria-label="Pages">
        {PAGES.map(([to, name]) => (
          <Link key={to} to={to} activeOptions={{ exact: true, includeSearch: false }}>
            {name}
          </Link>
        ))}
      </nav>
      <div className="end">
        <span className="connection">
          <State state={isOut ? "waiting" : state}>{isOut ? "logged out" : word}</State>
        </span>
        <ThemeChoice />
        <button type="button" onClick={help} aria-label="Keys">?</button>
        {session.data?.name ? (
          <button type="button" onClick={logOut}>Log out {session.data.name}</button>
        ) : null}
      </div>
    </header>
  );
}

const KEYS: [string, string][] = [
  ["/", "search"],
  ["j  k", "next and previous row"],
  ["Enter", "open the row"],
  ...Object.entries(GO).map(([key, [, name]]): [string, string] => [`g ${key}`, name]),
  ["?", "this help"],
];

function Help({ store }: { store: ReturnType<typeof useDialogStore> }) {
  const [isOn, setOn] = useState(areKeysOn);
  return (
    <Dialog store={store} className="dialog" backdrop={<div className="backdrop" />} unmountOnHide>
      <DialogHeading render={<h2 />}>Keys</DialogHeading>
      <table>
        <tbody>
          {KEYS.map(([keys, word]) => (
            <tr key={keys}>
              <td>{keys.split(" ").filter(Boolean).map((key) => <kbd key={key}>{key}</kbd>)}</td>
              <td>{word}</td>
            </tr>
          ))}
        </tbody>
      </table>
      <label className="beside-box">
        <input type="checkbox" checked={isOn} onChange={({ target: { checked } }) => {
          setKeys(checked);
          setOn(checked);
        }} />
        Use these keys in this browser. Speech input may press them by accident.
      </label>
      <div className="choices"><DialogDismiss>Close</DialogDismiss></div>
    </Dialog>
  );
}

export function Shell() {
  useLive();
  useKeptFocus();
  const help = useDialogStore();
  const navigate = useNavigate();
  const go = useCallback(
    (to: string, search: Record<string, string> = {}) => void navigate({ to, search }),
    [navigate],
  );
  useKeys(go, help.show);
  const session = useSession();
  const main = useRef<HTMLElement>(null);
  const path = useRouterState({ select: (state) => state.location.pathname });
  const first = useRef(true);
  useEffect(() => {
    // For screen readers, focus the new content, but not on the first page. A link inside of it,
    // such as a tab, keeps the focus for the next key.
    const isInside = main.current?.contains(document.activeElement);
    if (!first.current && !isInside) main.current?.focus({ preventScroll: true });
    first.current = false;
  }, [path]);
  return (
    <>
      <button type="button" className="skip" onClick={() => main.current?.focus()}>
        Skip to the content
      </button>
      <Bar help={help.show} />
      <Banner />
      <main ref={main} tabIndex={-1}>
        {isLoggedOut(session.data) ? <Login /> : <Outlet />}
      </main>
      <Help store={help} />
    </>
  );
}
