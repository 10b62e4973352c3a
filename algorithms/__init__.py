"""What is learned: one step of each kind of algorithm, advantages, losses, filters and corrections."""
