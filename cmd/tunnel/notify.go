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

// unitAdvice says what to do about a unit of systemd that would not learn from the process pid which process takes
// over. It returns "" if systemd would learn it, or has not started pid. The process pid must not have taken over
// itself: such a process is the main process of its service, but has the variables of the process that systemd has
// started.
func unitAdvice(env func(string) string, pid, parent int, mode string) (todo string) {
	started := env("SYSTEMD_EXEC_PID")
	switch {
	case env(notifyVariable) == "" && isChildOfSystemd(env, pid, parent):
		return "write NotifyAccess=main into the unit, as deployment/systemd has it"
	// systemd believes only the main process of a service.
	case env(notifyVariable) != "" && started != "" && started != strconv.Itoa(pid):
		return "the main process of the unit is " + started + ", and not this one: let ExecStart= start tunnel " + mode +
			", or write exec before it in the script"
	}
	return ""
}
