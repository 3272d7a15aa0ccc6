"""What a model's forward does besides computing its losses: found out, then kept right or refused."""
