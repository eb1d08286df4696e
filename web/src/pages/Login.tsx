// The login page.
import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useSearch } from "@tanstack/react-router";
import { useState } from "react";
import { ApiError, post } from "../api/client";
import { useSession } from "../api/session";
import { Problem, useTitle } from "../parts/basics";

const WRONG = "Invalid token.";
// The server's reasons for which a token in the address did not log in, by status.
const REFUSED: Record<number, string> = {
  401: "The token in the address is unknown, or has expired or been revoked.",
  429: "Too many wrong tokens came from this address. Try again in a minute.",
};

/** Why the token in the page's address was refused; null if there was none. */
function useRefused(): string | null {
  const { refused } = useSearch({ strict: false });
  if (!refused) return null;
  return REFUSED[refused] ?? `The server refused the token in the address: status ${refused}.`;
}

export function Login() {
  useTitle("Log in");
  const client = useQueryClient();
  const [token, setToken] = useState("");
  const refused = useRefused();
  const hasEnded = useSession().data?.hasEnded;
  const login = useMutation({
    mutationFn: () => post("/session", { token: token.trim() }),
    onSuccess: () => client.resetQueries(),
  });
  return (
    <div className="login">
      <h1>Log in</h1>
      {hasEnded ? (
        <div className="problem" role="alert">
          <strong>The session has ended.</strong>
          <p>Its token has expired or was revoked, or you logged out in another window. Requests
            since then were refused and changed nothing.</p>
        </div>
      ) : null}
      <p className="muted">
        Open the URL that <code>holdfast serve</code> printed, or enter a token that{" "}
        <code>holdfast token add</code> created on the server.
      </p>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          login.mutate();
        }}
      >
        <label htmlFor="token">Token</label>
        <input
          id="token"
          type="password"
          autoComplete="current-password"
          required
          autoFocus
          value={token}
          onChange={(event) => setToken(event.target.value)}
        />
        {login.isError ? (
          <Problem error={login.error} title={
            login.error instanceof ApiError && login.error.status === 401 ? WRONG : undefined} />
        ) : refused && !login.isPending ? <Problem error={refused} title={WRONG} /> : null}
        <button type="submit" className="primary" disabled={login.isPending}>Log in</button>
      </form>
    </div>
  );
}
