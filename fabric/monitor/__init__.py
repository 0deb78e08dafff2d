"""`fabric.monitor`: how fast a run is, where its steps spend their time, and which rank the others wait for."""
