package demo

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
)

// guest is a second node. It joins by a token, as an operator has a node join.
const guest = "edge2"

// checkJoin runs `tunnel token create`, `tunnel join` and `tunnel edge` for a second node.
// The node gets a certificate, and a session by it.
func (d *demo) checkJoin(ctx context.Context) error {
	created, err := tunnel(ctx, "", "token", "create", "-c", d.path("cloud.toml"),
		"--node", guest, "--ttl", "1m", "--json")
	if err != nil {
		return err
	}
	var token struct {
		Token string `json:"token"`
	}
	if err = json.Unmarshal([]byte(created), &token); err != nil {
		return fmt.Errorf("reading what tunnel token create has printed: %w", err)
	}
	steps, err := tunnel(ctx, token.Token+"\n", "join", "--dir", d.path(guest))
	if err != nil {
		return fmt.Errorf("%w\n%s", err, steps)
	}
	return d.guestReady(ctx)
}

// guestReady runs the second node's edge until it has a session.
func (d *demo) guestReady(ctx context.Context) error {
	var port int
	if err := freePorts(&port); err != nil {
		return err
	}
	config := d.path(guest + "/edge.toml")
	text, err := os.ReadFile(config)
	if err != nil {
		return err
	}
	// The file ends in the table that logport belongs to.
	if err = d.write(guest+"/edge.toml", fmt.Appendf(text, "logport = %d\n", port)); err != nil {
		return err
	}
	run, stop := context.WithCancel(ctx)
	defer stop()
	cmd, err := command(run, "edge", "-c", config)
	if err != nil {
		return err
	}
	var log strings.Builder
	cmd.Stdout, cmd.Stderr = &log, &log
	edge, err := start(cmd)
	if err != nil {
		return err
	}
	err = edge.awaitReady(ctx, port)
	stop()
	<-edge.ended // from here on nobody writes to log
	if err != nil {
		return fmt.Errorf("the edge of node %s is not ready: %w\n%s", guest, err, log.String())
	}
	return nil
}
