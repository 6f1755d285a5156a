package main

import (
	"fmt"
	"net"
	"os"
	"strconv"
)

// notifyVariable names the socket on which systemd takes notifications (sd_notify(3)).
const notifyVariable = "NOTIFY_SOCKET"

// dialSystemd connects to the socket of systemd; nil: systemd asks for no notifications.
func dialSystemd() (net.Conn, error) {
	path := os.Getenv(notifyVariable)
	if path == "" {
		return nil, nil
	}
	c, err := net.Dial("unixgram", path) // a name that begins with @ is abstract, as for systemd
	if err != nil {
		return nil, fmt.Errorf("systemd cannot be notified: %w", err)
	}
	return c, nil
}

// notify sends a notification to systemd, if systemd asks for notifications.
func notify(state string) error {
	c, err := dialSystemd()
	if c == nil {
		return err
	}
	defer c.Close()
	_, err = c.Write([]byte(state))
	return err
}

// isChildOfSystemd reports whether systemd is the parent of the process pid. systemd sets SYSTEMD_EXEC_PID to the id of
// each process that it starts. Before version 248 it set only INVOCATION_ID, and the parent's id has to say it.
func isChildOfSystemd(env func(string) string, pid, parent int) bool {
	return env("SYSTEMD_EXEC_PID") == strconv.Itoa(pid) ||
		env("SYSTEMD_EXEC_PID") == "" && env("INVOCATION_ID") != "" && parent == 1
}

// isUnknownChild reports whether systemd has started the process pid, but takes no notifications from it. Then systemd
// would not learn the id of a process that takes over.
func isUnknownChild(env func(string) string, pid, parent int) bool {
	return env(notifyVariable) == "" && isChildOfSystemd(env, pid, parent)
}
