package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"tunnel.example/tunnel/pkg/tap"
	"tunnel.example/tunnel/pkg/tunnel"
)

func newTapCommand() *cobra.Command {
	var ask askFlags
	var output outputFlag
	cmd := &cobra.Command{
		Use:   "tap [NODE]",
		Short: "Show conns as they open and end, until Ctrl-C",
		Long: `tap shows the conns of callers as they open and end, on all replicas of the cloud.
A line says who calls which node and target through which front door, and why a caller was refused.
At the end it says how many bytes went each way, and how long the conn took.
With NODE it shows the conns of one node. It never shows what is sent.

SENT went to the target, and RECEIVED came from it. DUR of an open is the time until the caller had its conn.
Requests that the HTTPS front door terminates are conns of their own here.

A reader that is too slow, such as a stopped terminal, loses events; a warning says how many.
With -o json each event is a line, and with -o yaml a document.

  tunnel tap
  tunnel tap edge1 -o json | jq 'select(.phase == "refused")'

Exit codes: 0 ended by Ctrl-C, 1 no cloud answers, or the cloud has stopped.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return errors.New("name one node, or none")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := output.check(); err != nil {
				return err
			}
			node := ""
			if len(args) == 1 {
				name, err := tunnel.ParseNodeName(args[0])
				if err != nil {
					return &exitError{exitUsage, err}
				}
				node = string(name)
			}
			client, err := ask.cloud()
			if err != nil {
				return err
			}
			p := tapPrinter{out: cmd.OutOrStdout(), errs: cmd.ErrOrStderr(), output: output}
			err = client.Tap(cmd.Context(), node, p.show)
			if cmd.Context().Err() != nil { // Ctrl-C
				return nil
			}
			return failed(err)
		},
		ValidArgsFunction: ask.firstNode,
	}
	ask.register(cmd, cloudFile)
	output.register(cmd, "table", "wide", "json", "yaml")
	return cmd
}

// tapPrinter prints lines of a tap.
type tapPrinter struct {
	out, errs io.Writer
	output    outputFlag
	began     bool // the head of the table is printed
}

// show prints a line. A line for programs is printed as it came.
func (p *tapPrinter) show(line tap.Line) error {
	if done, err := p.output.encodeLine(p.out, line); done {
		return err
	}
	switch {
	case line.Lost > 0:
		fmt.Fprintf(p.errs, "warning: %d events are lost, because this reader is too slow\n", line.Lost)
		return nil
	case line.Warning != "":
		fmt.Fprintln(p.errs, "warning: "+tunnel.Printable(line.Warning))
		return nil
	case line.Event == nil: // a remark of a newer cloud
		return nil
	}
	if !p.began {
		p.began = true
		if err := p.row("", "TIME", "WHAT", "NODE", "KIND", "CALLER", "TARGET", "RESULT", "SENT", "RECEIVED", "DUR",
			"FRONTEND", "REPLICA"); err != nil {
			return err
		}
	}
	e := line.Event
	return p.row(remark(e), e.Time.Local().Format("15:04:05.000"), string(line.Phase), string(e.Node), string(e.Kind),
		e.Caller, e.Target, e.Result, bytesOf(line.Phase, e.Sent), bytesOf(line.Phase, e.Received), took(e.Seconds),
		e.Door, line.Replica)
}

// row prints the cells of a line, and then a text that has no column. The columns are as wide as usual values need,
// since row does not know later values.
func (p *tapPrinter) row(text string, cells ...string) error {
	widths := []int{12, 7, 12, 7, 21, 21, 7, 8, 8, 7, 15, 10}
	if p.output.form != "wide" {
		cells = cells[:len(cells)-2]
	}
	line := ""
	for i, cell := range cells {
		line += fmt.Sprintf("%-*s  ", widths[i], tunnel.Printable(cmp.Or(cell, "-")))
	}
	_, err := fmt.Fprintln(p.out, line+tunnel.Printable(text))
	return err
}

// remark returns what an event says beside its columns.
func remark(e *tunnel.Event) (text string) {
	if e.Method != "" {
		text = e.Method + " " + e.Path
		if e.Status != 0 {
			text += " " + strconv.Itoa(e.Status)
		}
	}
	if e.Err != "" {
		if text != "" {
			text += ": "
		}
		text += e.Err
	}
	if e.Skipped > 0 {
		text += fmt.Sprintf(" (and %d more before)", e.Skipped)
	}
	return text
}

// bytesOf returns a number of bytes. A conn that opens has none yet.
func bytesOf(phase tunnel.Phase, n int64) string {
	if phase == tunnel.PhaseOpen {
		return "-"
	}
	return size(uint64(max(n, 0)))
}

// took returns a duration in seconds for people.
func took(seconds float64) string {
	if seconds < 1 {
		return millis(seconds)
	}
	return (time.Duration(seconds * float64(time.Second))).Round(100 * time.Millisecond).String()
}
