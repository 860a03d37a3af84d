"""The web console: pages rendered on the server, which refresh themselves if JavaScript is enabled."""
