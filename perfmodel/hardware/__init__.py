"""What devices can do by their data sheets, and which device a name means."""
