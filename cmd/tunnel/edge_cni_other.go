//go:build !linux

package main

import (
	"errors"

	"github.com/spf13/cobra"
)

// systemCommands are the commands that only Linux has.
func systemCommands() []*cobra.Command { return nil }

// addCNI refuses [mode.edge.cni]: pods have networks on Linux only.
func (w *edgeWiring) addCNI() error {
	if w.conf.CNI.On {
		return errors.New("mode.edge.cni: this system is not Linux; remove the table")
	}
	return nil
}
