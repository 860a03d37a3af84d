"""The actions and login probes of rollouts: commands, webhooks, SQL logins."""
