"""Signs people in through an OpenID Connect provider: the authorization code flow with PKCE, state and nonce."""
