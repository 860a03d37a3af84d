// Steps in which a connection ends in the middle of an operation.

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-sql-driver/mysql"
)

const (
	deadline = 20 * time.Second // limit until the server has noticed an event
	sleep    = 60               // duration in seconds of a query that is to be killed
)

// lock waits until no other session holds the lock, and takes it; the server releases it when its session ends. With 0
// it checks, without waiting, that another session holds it.
func (s session) lock(name string, got int64) error {
	return s.expect(got, fmt.Sprintf("select get_lock('%s', %d)", name, int64(deadline.Seconds())*got))
}

func (p plan) kill() (string, error) {
	victim, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer victim.close()
	killer, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer killer.close()
	number, err := victim.number("select connection_id()")
	if err != nil {
		return "", err
	}
	begun, gone := fmt.Sprintf("begun %d", number), fmt.Sprintf("gone %d", number)
	err = first(
		func() error { return victim.lock(begun, 1) },
		func() error { return victim.lock(gone, 1) },
	)
	if err != nil {
		return "", err
	}
	ended := make(chan error, 1)
	go func() {
		_, err := victim.number(fmt.Sprintf("select release_lock('%s') + sleep(%d)", begun, sleep))
		ended <- err
	}()
	err = first(
		func() error { return killer.lock(begun, 1) },
		func() error { return killer.exec(fmt.Sprintf("kill %d", number)) },
	)
	if err != nil {
		return "", err
	}
	var answer *mysql.MySQLError
	select {
	case err = <-ended:
	case <-time.After(deadline):
		return "", errors.New("the query goes on")
	}
	outcome := "connection lost"
	if errors.As(err, &answer) {
		outcome = fmt.Sprintf("error %d", answer.Number)
	} else if !errors.Is(err, mysql.ErrInvalidConn) {
		return "", fmt.Errorf("neither an answer nor a lost connection: %v", err)
	}
	return outcome, killer.lock(gone, 1)
}

func (p plan) cut() (string, error) {
	other, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer other.close()
	s, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer s.close()
	number, err := s.number("select connection_id()")
	if err != nil {
		return "", err
	}
	gone := fmt.Sprintf("gone %d", number)
	if err := s.lock(gone, 1); err != nil {
		return "", err
	}
	vanish, cancel := context.WithCancel(context.Background())
	defer cancel()
	found, err := s.QueryContext(vanish, "select n, repeat('x', 100) from numbers")
	if err != nil {
		return "", err
	}
	for i := 0; i < 1000; i++ {
		if !found.Next() {
			return "", fmt.Errorf("only %d rows: %v", i, found.Err())
		}
	}
	if err := other.lock(gone, 0); err != nil {
		return "", err
	}
	cancel() // the driver closes the connection without COM_QUIT
	if err := other.lock(gone, 1); err != nil {
		return "", err
	}
	found.Close()
	fresh, err := p.open(true, nil)
	if err != nil {
		return "", err
	}
	defer fresh.close()
	return "", fresh.expect(1, "select 1")
}
