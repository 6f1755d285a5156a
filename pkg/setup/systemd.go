package setup

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// The units as packages install them. A test checks that they are equal to those in deployment/systemd.
//
//go:embed tunnel-cloud.service
var cloudUnit string

//go:embed tunnel-edge.service
var edgeUnit string

// service is a daemon that systemd can run on this machine: the cloud or the edge.
type service struct {
	mode string // the command that starts the daemon: "cloud" or "edge"
	unit string // the text of the unit, as packages install it
	done string // for errors: what Init or Join has done already when the unit cannot be installed
}

func cloudService() service { return service{"cloud", cloudUnit, "The cloud's files are there"} }
func edgeService() service  { return service{"edge", edgeUnit, "This machine has joined"} }

// name returns the name of the unit, without ".service".
func (s service) name() string { return "tunnel-" + s.mode }

// config returns the path of the configuration in a folder.
func (s service) config(dir string) string { return filepath.Join(dir, s.mode+".toml") }

// start returns the line of the unit that starts a program with the configuration of a folder.
func (s service) start(program, dir string) string {
	return "ExecStart=" + program + " " + s.mode + " -c " + s.config(dir) + "\n"
}

const (
	// packageProgram is the path of the program in the units of packages. systemdUnit.text replaces this path by the
	// path of the running program, and DefaultDir by the folder of the configuration.
	packageProgram = "/usr/bin/tunnel"
	// installProgram is where an operator installs the program by hand.
	installProgram = "/usr/local/bin/tunnel"
	// booted is a folder that exists if systemd runs this machine (sd_booted(3)).
	booted = "/run/systemd/system"
)

// unitFolders are folders of units (systemd.unit(5)). A unit in own hides a unit of the same name in packages.
type unitFolders struct {
	own      string   // the folder for units of the operator, and of --systemd
	packages []string // the folders for units of packages; systemd uses the first one that has the unit
}

func systemFolders() unitFolders {
	return unitFolders{"/etc/systemd/system", []string{"/usr/lib/systemd/system", "/lib/systemd/system"}}
}

// systemdUnit is a unit for this machine.
type systemdUnit struct {
	service
	program   string        // the path of the program that the unit starts
	dir       string        // the folder of the configuration
	lowPort   bool          // the service listens on a port below 1024
	systemctl string        // the path of systemctl
	settle    time.Duration // how long after the restart install looks whether the service runs
	notes     []string      // further lines about the unit for the operator; write adds them
}

// newSystemdUnit checks that systemd runs this machine, and that systemd could run the service with the files in
// dir, an absolute path. It writes nothing. Its errors are of type *stepError.
func newSystemdUnit(s service, dir string, h Host) (*systemdUnit, error) {
	program, err := os.Executable()
	if err == nil {
		program, err = filepath.EvalSymlinks(program)
	}
	if err != nil {
		return nil, err
	}
	systemctl, err := findSystemctl()
	failed := &stepError{step: "systemd", err: err}
	switch {
	case err != nil:
		failed.fix = fmt.Sprintf("Nothing was written or sent. Leave --systemd out, and have the program that starts "+
			"the services of this machine start: %stunnel %s -c %s", h.sudo(), s.mode, shellQuote(s.config(dir)))
	case os.Geteuid() != 0:
		failed.err = errors.New("only root may add a unit")
		failed.fix = "Run this with sudo. Nothing was written or sent."
	case hidden(program):
		failed.err = fmt.Errorf("the unit does not see %s: it has no home and no /tmp", program)
		failed.fix = "Install the program first: sudo install -m 755 " + shellQuote(program) + " " + installProgram
	case hidden(dir):
		failed.err = fmt.Errorf("the unit does not see %s: it has no home and no /tmp", dir)
		failed.fix = "Leave --dir out: the files go to " + DefaultDir + "."
	case !enterable(dir):
		failed.err = fmt.Errorf("the unit's user, which is not root, may not enter %s", dir)
		failed.fix = "chmod 755 " + shellQuote(dir) + ": what is secret in it has a mode of its own."
	case strings.ContainsAny(program+dir, " \t%\"'\\$"):
		failed.err = fmt.Errorf("a unit cannot name %s or %s as they are", program, dir)
		failed.fix = "Choose paths without blanks, quotes and % signs."
	default:
		return &systemdUnit{service: s, program: program, dir: dir, systemctl: systemctl, settle: settleTime}, nil
	}
	return nil, failed
}

// settleTime is the value of systemdUnit.settle. A daemon with a bad configuration ends within a second. systemd starts
// it again five seconds later (RestartSec=), so a look after two seconds finds that it does not run.
const settleTime = 2 * time.Second

// findSystemctl returns the path of systemctl. It fails unless systemd runs this machine: a container may have
// the program systemctl without a running systemd.
func findSystemctl() (string, error) {
	if _, err := os.Stat(booted); err != nil {
		return "", errors.New("systemd does not run this machine: there is no " + booted)
	}
	path, err := exec.LookPath("systemctl")
	if err != nil {
		return "", errors.New("there is no systemctl here")
	}
	return path, nil
}

// hidden reports whether ProtectHome or PrivateTmp in the unit hides path from the service.
func hidden(path string) bool {
	for _, dir := range []string{"/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/"} {
		if strings.HasPrefix(path+"/", dir) {
			return true
		}
	}
	return false
}

// enterable reports whether every user may read and enter a folder. For a missing folder it returns true, since
// makeDir will make a folder that every user may enter.
func enterable(dir string) bool {
	info, err := os.Stat(dir)
	return errors.Is(err, fs.ErrNotExist) || err == nil && info.Mode().Perm()&0o005 == 0o005
}

// bindLowPorts are settings of a unit that let its service listen on ports below 1024.
const bindLowPorts = "CapabilityBoundingSet=CAP_NET_BIND_SERVICE\nAmbientCapabilities=CAP_NET_BIND_SERVICE\n"

// text returns the whole unit, for a machine where no package has installed one.
func (u *systemdUnit) text() string {
	text := strings.Replace(u.unit, u.start(packageProgram, DefaultDir), u.start(u.program, u.dir), 1)
	if u.lowPort {
		text = strings.Replace(text, "\nCapabilityBoundingSet=\n", "\n"+bindLowPorts, 1)
	}
	return text
}

// dropIn returns the drop-in that this service needs beside unit, the text of a package's unit; "": none.
func (u *systemdUnit) dropIn(unit string) string {
	var settings string
	if start := u.start(u.program, u.dir); !strings.Contains(unit, "\n"+start) {
		settings = "# The empty value removes the command of the package's unit.\nExecStart=\n" + start
	}
	if u.lowPort {
		settings += bindLowPorts
	}
	if settings == "" {
		return ""
	}
	return fmt.Sprintf("# `tunnel` writes and removes this file (--systemd). Settings of your own: systemctl edit %s\n"+
		"[Service]\n%s", u.name(), settings)
}

// install writes the unit, and tells systemd to start the service now and at boot. systemd restarts a running
// service, since the files of the service may have changed.
func (u *systemdUnit) install(ctx context.Context) error {
	if err := u.write(systemFolders()); err != nil {
		return &stepError{step: "systemd", err: err, fix: u.done + "; only the unit is missing."}
	}
	return u.restart(ctx)
}

// restart enables and restarts the service. It fails if the service does not run a moment later: systemctl reports
// success as soon as systemd has made the process, and the process may end at once.
func (u *systemdUnit) restart(ctx context.Context) error {
	failed := func(err error) error {
		return &stepError{
			step: "systemd", err: err,
			fix: fmt.Sprintf("%s; systemctl cat %s shows the unit, and journalctl -u %[2]s says more.", u.done, u.name()),
		}
	}
	for _, args := range [][]string{{"daemon-reload"}, {"enable", u.name()}, {"restart", u.name()}} {
		out, err := exec.CommandContext(ctx, u.systemctl, args...).CombinedOutput()
		if err != nil {
			return failed(fmt.Errorf("systemctl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out))))
		}
	}
	select {
	case <-time.After(u.settle):
	case <-ctx.Done():
		return ctx.Err()
	}
	// systemctl prints the state. Its exit code is 0 for "active" and "reloading".
	out, err := exec.CommandContext(ctx, u.systemctl, "is-active", u.name()).CombinedOutput()
	switch state := strings.TrimSpace(string(out)); {
	case state == "" && err != nil:
		return failed(fmt.Errorf("systemctl is-active %s: %w", u.name(), err))
	case state != "active" && state != "reloading":
		return failed(fmt.Errorf("%s was started and does not run: systemd says %s", u.name(), state))
	}
	return nil
}

// write writes the unit. If a package has installed one, write adds at most a drop-in: a whole unit would hide the
// package's unit, and after an upgrade the new one, too.
func (u *systemdUnit) write(folders unitFolders) error {
	file := filepath.Join(folders.own, u.name()+".service")
	added := filepath.Join(file+".d", "50-tunnel.conf") // an operator's override.conf sorts later, so it prevails
	unit, text, err := folders.packaged(u.name())
	if err != nil {
		return err
	}
	if unit == "" {
		if err = removeIfThere(added); err != nil { // an earlier write made the drop-in, for a package that is gone
			return err
		}
		return u.replace(file)
	}
	u.notes = append(u.notes, "the unit is the package's: "+unit)
	if err = u.uncover(file); err != nil {
		return err
	}
	settings := u.dropIn(text)
	if settings == "" {
		return removeIfThere(added)
	}
	if err = makeDir(filepath.Dir(added)); err != nil {
		return err
	}
	u.notes = append(u.notes, "the unit has a drop-in for the command line or the port: "+added)
	return overwrite(added, newFile{mode: publicFile, content: []byte(settings)})
}

// replace writes the whole unit. An operator may have edited the unit at path file, so replace keeps a copy of a unit
// that differs.
func (u *systemdUnit) replace(file string) error {
	old, err := os.ReadFile(file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return err
	case string(old) == u.text():
		return nil
	case len(old) > 0: // a unit that is masked leads to /dev/null
		if err = keepOld(file, old); err != nil {
			return err
		}
		u.notes = append(u.notes, fmt.Sprintf("%s was another unit, which is now %s; settings of your own: systemctl edit %s",
			file, file+oldSuffix, u.name()))
	}
	return overwrite(file, newFile{mode: publicFile, content: []byte(u.text())})
}

// packaged returns the path and the text of the unit that a package has installed. Without one, the path is "".
func (f unitFolders) packaged(name string) (path, text string, _ error) {
	for _, dir := range f.packages {
		path = filepath.Join(dir, name+".service")
		got, err := os.ReadFile(path)
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return path, string(got), err
		}
	}
	return "", "", nil
}

// uncover renames the unit at path file to file.old, if it exists. systemd prefers a unit at this path to the unit of
// the package. An earlier --systemd or an operator wrote the unit there, before the package was installed.
func (u *systemdUnit) uncover(file string) error {
	old := file + oldSuffix
	err := os.Rename(file, old)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		u.notes = append(u.notes, fmt.Sprintf("%s hid the package's unit, and is now %s", file, old))
	}
	return err
}

// removeIfThere removes a file, if there is one.
func removeIfThere(path string) error {
	if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// running returns lines that an operator reads about an installed unit.
func (u *systemdUnit) running() []string {
	return append([]string{
		fmt.Sprintf("%s runs now, and starts with the machine: journalctl -u %[1]s", u.name()),
	}, u.notes...)
}
