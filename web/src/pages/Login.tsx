// The login page.
import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { post } from "../api/client";
import { Problem, useTitle } from "../parts/basics";

export function Login() {
  useTitle("Log in");
  const client = useQueryClient();
  const [token, setToken] = useState("");
  const login = useMutation({
    mutationFn: () => post("/session", { token: token.trim() }),
    onSuccess: () => client.resetQueries(),
  });
  return (
    <div className="login">
      <h1>Log in</h1>
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
        {login.isError ? <Problem error={login.error} /> : null}
        <button type="submit" className="primary" disabled={login.isPending}>Log in</button>
      </form>
    </div>
  );
}
